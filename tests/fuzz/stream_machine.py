"""A server that says what it likes, in reads of any size: what comes out keeps the laws.

The machine is the server. It knows what it said, so it knows what the caller must have: each law is
an invariant of its own here, beside :func:`laws.violations`, which knows the frames only.
"""

from __future__ import annotations

import json
from typing import Any

from chunks import assembler
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from laws import strict, violations

from provider_llamacpp import jsontext
from provider_llamacpp.errors import ProviderError
from provider_llamacpp.events.assembler import Assembler, Outcome
from provider_llamacpp.transcript.arguments import parse_arguments

CUT = ("stays open", "start comes alone")
"""What :func:`violations` says of frames that stop in the middle, as they do after an abort."""

ODD = st.sampled_from(
    [
        *('"', "\\", "\n", "\t", "\x00", "\x7f", "/", "%b", "%%", "\ud83d", "\ude00", "\U0001f600"),
        *("\u2028", " ", "a", "I say", "data: ", "\r", "\ufeff", "0", "1"),
    ]
)
TEXT = st.lists(ODD | st.text(max_size=3), min_size=1, max_size=4).map("".join).filter(bool)
RAW_TEXT = st.binary(min_size=1, max_size=6).map(
    lambda raw: bytes(byte for byte in raw if byte >= 0x20 and byte not in b'"\\') or b"r"
)
PLAIN = st.sampled_from(["a", " word", "b", "ü", "."])
NUMBER = st.integers(-1, 9) | st.none() | st.floats() | st.sampled_from([2**53, 2**53 + 1, 1e300])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ODD_FRAGMENT = st.fixed_dictionaries(
    {},
    optional={
        "index": st.sampled_from([0, 1, 2, 128, 129, None, -1, "0", True, 1.5]),
        "id": st.sampled_from(["a", "b", "", None, "\ud83d", "\ude00", 5]),
        "function": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["x", "fs__y", "", None, "\udc00"]),
                "id": st.sampled_from(["c", ""]),
                "arguments": st.sampled_from(["{", "}", '"p":', "1", "{}", "", None]) | ANY_JSON,
            },
        ),
    },
)
KINDS = {"content": "text", "reasoning_content": "thinking", "reasoning": "thinking"}


class Said:
    """What the server said in one answer, and so what its caller must be shown."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, str]] = []
        """Kind and text of each stretch of the answer, in order; calls have none here."""
        self.calls: dict[str, str] = {}
        """Arguments by id."""
        self.sure = True
        """False once something was said that may be read in more than one way."""

    def add(self, kind: str, text: str) -> None:
        """``text`` follows; a half of a surrogate pair finds its other half in the same run."""
        if self.runs and self.runs[-1][0] == kind:
            text = self.runs.pop()[1] + text
        self.runs.append((kind, text))

    def text(self, kind: str) -> str:
        return "".join(jsontext.whole(text) for each, text in self.runs if each == kind)


class StreamMachine(RuleBasedStateMachine):
    """One answer, from its first byte to its end and beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.body = b""
        self.fed = 0
        self.frames: list[bytes] = []
        self.said = Said()
        self.finished = False
        """The server gave a finish reason."""
        self.failed = False
        """It said something that is an error."""
        self.marked = False
        """It sent the end marker: nothing behind it counts."""
        self.over: Outcome | None = None
        self.newline = b"\n"

    @initialize(
        fat=st.booleans(),
        learning=st.sampled_from([True, True, True, False]),
        secret=st.sampled_from([None, "a"]),
        newline=st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r"]),
        compact=st.booleans(),
    )
    def begin(
        self, fat: bool, learning: bool, secret: str | None, newline: bytes, compact: bool
    ) -> None:
        self.options: dict[str, Any] = {"fat": fat, "learning": learning, "secret": secret}
        self.machine = self.new(**self.options)
        self.newline = newline
        self.separators = (",", ":") if compact else None

    def new(self, **options: Any) -> Assembler:
        # A clock that stands still: two machines must give the same bytes.
        return assembler(now_ms=lambda: 1, **options)

    # -- what the server says -------------------------------------------------------------

    def line(self, text: bytes) -> None:
        self.body += text.replace(b"\n", self.newline)

    def event(self, value: Any, *, ascii_only: bool = True) -> None:
        text = json.dumps(value, ensure_ascii=ascii_only, separators=self.separators)
        self.line(b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n")

    def chunk(self, delta: Any, reason: str | None = None, **more: Any) -> None:
        choice = {"finish_reason": reason, "index": 0, "delta": delta}
        self.event({"choices": [choice], "created": 7, "id": "x", "model": "m", **more})

    @property
    def heard(self) -> bool:
        """What is said now still counts."""
        return not (self.failed or self.marked)

    def running(self) -> bool:
        return self.over is None

    @precondition(running)
    @rule(key=st.sampled_from(sorted(KINDS)), text=TEXT)
    def says(self, key: str, text: str) -> None:
        self.chunk({key: text})
        if self.heard:
            self.said.add(KINDS[key], text)

    @precondition(running)
    @rule(key=st.sampled_from(["content", "reasoning_content"]), words=st.lists(PLAIN, max_size=6))
    def says_many_words(self, key: str, words: list[str]) -> None:
        """What the short way is for."""
        for word in words:
            self.chunk({key: word})
            if self.heard:
                self.said.add(KINDS[key], word)

    @precondition(running)
    @rule(raw=RAW_TEXT)
    def says_raw_bytes(self, raw: bytes) -> None:
        self.line(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % raw)
        if self.heard:
            self.said.add("text", raw.decode("utf-8", "replace"))

    @precondition(running)
    @rule(name=st.sampled_from(["x", "fs__y"]), text=st.sampled_from(["", "{", '{"a":1']))
    def calls(self, name: str, text: str) -> None:
        """A call as llama-server begins one."""
        index = len(self.said.calls)
        name_of = f"c{index}"
        function = {"name": name, "arguments": text}
        fragment = {"index": index, "id": name_of, "type": "function", "function": function}
        self.chunk({"tool_calls": [fragment]})
        if self.heard:
            self.said.calls[name_of] = text
            self.said.runs.append(("call", ""))

    @precondition(lambda self: self.running() and self.said.calls)
    @rule(which=st.integers(0, 100), text=TEXT)
    def goes_on_with_a_call(self, which: int, text: str) -> None:
        index = which % len(self.said.calls)
        self.chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        if self.heard:
            self.said.calls[f"c{index}"] += text
            self.said.runs.append(("call", ""))
            if text != jsontext.whole(text):
                self.said.sure = False  # halves that other calls tore apart

    @precondition(running)
    @rule(fragments=st.lists(ODD_FRAGMENT, max_size=3))
    def says_odd_things_of_calls(self, fragments: list[Any]) -> None:
        self.chunk({"tool_calls": fragments})
        if self.heard:
            self.said.sure = False

    @precondition(running)
    @rule(value=ANY_JSON, where=st.sampled_from(["delta", "choice", "chunk", "choices", "index"]))
    def says_what_no_server_says(self, value: Any, where: str) -> None:
        if where == "delta":
            self.chunk(value)
        elif where == "choice":
            self.event({"choices": [value], "model": value})
        elif where == "choices":
            self.event({"choices": value, "id": value})
        elif where == "index":
            self.event({"choices": [{"index": value, "delta": {"content": "i"}}]})
        else:
            self.event(value)
        self.said.sure = self.said.sure and not self.heard

    @precondition(running)
    @rule(
        counts=st.dictionaries(
            st.sampled_from(["prompt_tokens", "completion_tokens", "total_tokens"]),
            NUMBER,
            max_size=3,
        )
    )
    def counts(self, counts: dict[str, Any]) -> None:
        self.event({"choices": [], "usage": counts})

    @precondition(running)
    @rule(
        text=st.sampled_from(
            [b":\n\n", b": well\n\n", b"\n\n\n", b"id: 1\n\n", b"retry: 5\n", b"data:\n\n", b"\n"]
        )
    )
    def is_alive(self, text: bytes) -> None:
        """Comments and fields that say nothing."""
        self.line(text)

    @precondition(running)
    @rule(progress=st.integers(0, 9))
    def prepares(self, progress: int) -> None:
        self.chunk({}, prompt_progress={"processed": progress, "total": 9})

    @precondition(lambda self: self.running() and not self.finished)
    @rule(reason=st.sampled_from(["stop", "length", "tool_calls", "odd"]))
    def finishes(self, reason: str) -> None:
        self.chunk({}, reason)
        self.finished = self.finished or self.heard
        # Text behind the finish reason is heard; the order of the blocks is the assembler's.
        self.said.runs.append(("call", ""))

    @precondition(running)
    @rule()
    def ends_with_a_marker(self) -> None:
        self.line(b"data: [DONE]\n\n")
        self.marked = True

    @precondition(running)
    @rule(
        text=st.sampled_from(
            [
                b'data: {"error":{"code":500,"message":"broke"}}\n\n',
                b'error: {"message":"broke"}\n\n',
                b"error: words\n\n",
                b'data: {"error":"a"}\n\n',
                b"data: {\n\n",
                b"data: \xff\n\n",
                b"data: [[\n\n",
            ]
        )
    )
    def fails(self, text: bytes) -> None:
        self.line(text)
        self.failed = self.failed or not self.marked

    @precondition(running)
    @rule(noise=st.binary(max_size=12))
    def makes_noise(self, noise: bytes) -> None:
        """Bytes that may be anything, an error among it."""
        self.body += noise
        self.said.sure = False

    # -- how it arrives, and how it ends --------------------------------------------------

    @precondition(lambda self: self.running() and self.fed < len(self.body))
    @rule(share=st.floats(0, 1), size=st.sampled_from([0, 0, 0, 1, 2, 7]))
    def arrives(self, share: float, size: int) -> None:
        """Some of what was said, in reads of ``size`` bytes, or in one."""
        upto = self.fed + 1 + round(share * (len(self.body) - self.fed - 1))
        self.feed(self.body[self.fed : upto], size)

    def feed(self, data: bytes, size: int) -> None:
        self.fed += len(data)
        for at in range(0, len(data), size or len(data) or 1):
            self.frames += self.machine.feed(data[at : at + (size or len(data))])

    def end(self, outcome: Outcome) -> None:
        self.over = outcome
        self.frames += self.machine.finish(outcome)

    @precondition(running)
    @rule(size=st.sampled_from([0, 1, 3]))
    def body_ends(self, size: int) -> None:
        self.feed(self.body[self.fed :], size)
        self.end(Outcome())

    @precondition(running)
    @rule()
    def connection_breaks(self) -> None:
        self.end(Outcome(error=ProviderError("transient", "the connection broke")))

    @precondition(running)
    @rule(reason=st.sampled_from(["abort", "consumer gone", "stop"]))
    def is_aborted(self, reason: str) -> None:
        self.end(Outcome(reason=reason))

    @precondition(lambda self: self.over is not None)
    @rule(more=st.binary(max_size=20))
    def goes_on_after_the_end(self, more: bytes) -> None:
        assert self.machine.feed(more + b'data: {"choices":[]}\n\n') == []
        assert self.machine.finish(Outcome()) == []

    # -- the laws -------------------------------------------------------------------------

    def values(self) -> list[dict[str, Any]]:
        return [strict(frame) for frame in self.frames]

    @property
    def silent(self) -> bool:
        return self.over is not None and self.over.reason in ("abort", "consumer gone")

    @invariant()
    def one_terminal_and_nothing_behind_it(self) -> None:
        ends = [at for at, frame in enumerate(self.values()) if frame["type"] in ("done", "error")]
        if self.over is None or self.silent:
            assert ends == []
        else:
            assert ends == [len(self.frames) - 1]

    @invariant()
    def start_comes_first(self) -> None:
        kinds = [frame["type"] for frame in self.values()]
        assert not kinds or kinds[0] == "start" or kinds == ["error"]
        assert kinds.count("start") <= 1

    @invariant()
    def blocks_are_balanced(self) -> None:
        opened = None
        for frame in self.values():
            kind, _, edge = frame["type"].rpartition("_")
            if edge == "start" and kind:
                assert opened is None
                opened = kind
            elif edge in ("delta", "end"):
                assert opened == kind
                opened = None if edge == "end" else opened
        if self.over is not None and not self.silent:
            assert opened is None

    @invariant()
    def no_token_twice_or_lost(self) -> None:
        """The deltas are a beginning of what was said; all of it, if the answer is complete."""
        if not self.said.sure:
            return
        texts = {"text": "", "thinking": ""}
        calls: dict[str, str] = {}
        values = self.values()
        for frame in values:
            if frame["type"] == "functioncall_delta":
                calls[frame["id"]] = calls.get(frame["id"], "") + frame["delta"]
            elif frame["type"].endswith("_delta"):
                texts[frame["type"][:-6]] += frame["delta"]
        everything = self.fed == len(self.body) and self.over is not None and not self.silent
        for kind, text in texts.items():
            assert self.said.text(kind).startswith(text)
            if everything:
                assert self.said.text(kind) == text
        for name, text in calls.items():
            assert self.said.calls[name].startswith(text)
            if everything:
                assert self.said.calls[name] == text
        if everything:
            assert calls.keys() == {name for name, text in self.said.calls.items() if text}
            shown = values[-1].get("message") or values[-1]["error"]
            found = {
                block["id"]: block["arguments"]
                for block in shown["content"]
                if block["type"] == "function_call"
            }
            for name, text in self.said.calls.items():
                cut = {"_partial": True} if not text else found[name]
                assert found[name] in (parse_arguments(text), cut)

    @invariant()
    def the_outcome_is_what_the_server_said(self) -> None:
        if self.over is None or self.silent or not self.said.sure:
            return
        if self.fed == len(self.body):
            good = self.finished and not self.failed
            assert self.values()[-1]["type"] == ("done" if good else "error")

    @invariant()
    def laws_of_the_channel(self) -> None:
        """Those that know nothing of what was said."""
        terminal = self.over is not None and not self.silent
        found = violations(self.frames, terminal=terminal)
        assert [each for each in found if terminal or not each.endswith(CUT)] == []

    def teardown(self) -> None:
        """The same bytes in one read give the same frames, by the long way too."""
        if not hasattr(self, "machine"):
            return
        if self.over is None:
            self.end(Outcome(reason="stop"))
            self.laws_of_the_channel()
        assert self.over is not None
        for learning in (False, True):
            other = self.new(**{**self.options, "learning": learning})
            frames = other.feed(self.body[: self.fed])
            assert frames + other.finish(self.over) == self.frames
