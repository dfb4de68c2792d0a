"""Takes the time of streams: through the worker, and beside it directly against llama-server.

Both ways send the same request and are read alike: blocks of bytes with the time of their arrival,
looked into after the stream has ended. What the worker adds is then what differs.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .. import jsontext
from ..answers import COMPLETIONS
from ..bus.frames import CLOSE, PING, TEXT, FrameReader
from ..calls import Call
from ..errors import BusError, ConsumerGone, Interrupted, ProviderError, ProviderLlamacppError
from ..events.classify import classify, error_in
from ..events.sse import EventCutter
from ..payloads import decode_stream
from ..server.address import Target
from ..server.upstream import Upstream
from ..transcript.convert import Abilities, chat_body
from .caller import read_end

if TYPE_CHECKING:
    from ..settings import Settings
    from .caller import Caller

LONGEST = 3600.0
"""Seconds for one stream."""
_READ = 65536
_LARGEST_FRAME = 64 * 1024 * 1024

PathName = Literal["direct", "worker"]
PATHS: tuple[PathName, PathName] = ("direct", "worker")

WORDS = (
    *("river", "stone", "window", "letter", "garden", "music", "bridge", "winter", "candle"),
    *("market", "silver", "thunder", "pepper", "harbor", "engine", "meadow", "ladder", "copper"),
    *("shadow", "basket", "pencil", "island", "forest", "mirror", "button", "saddle", "ribbon"),
)


class StreamFailed(ProviderLlamacppError):
    """A stream that was to be measured ended in an error."""


@dataclass(frozen=True, slots=True)
class Task:
    """What every stream does."""

    model: str
    words: int
    """Of the prompt; the server counts its tokens."""
    tokens: int
    """Of the answer. The model is kept from ending earlier."""

    def payload(self, prompt: str) -> dict[str, Any]:
        """A stream's payload without its ``writer_ref``.

        Without the cache every prompt is read whole; at temperature 0 both ways get equal work.
        """
        text = {"type": "text", "text": prompt}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": [text], "timestamp": 1}],
            "max_output_tokens": self.tokens,
            "provider_options": {"ignore_eos": True, "cache_prompt": False, "temperature": 0.0},
        }

    def prompt(self, chance: random.Random) -> str:
        """Another text each time."""
        return " ".join(chance.choices(WORDS, k=self.words))


@dataclass(frozen=True, slots=True)
class Sample:
    """One stream. Times are seconds since it was sent."""

    began: float
    """When it was sent, by ``time.monotonic()``."""
    first: float
    """Until the first text arrived."""
    last: float
    """Until the end of the text arrived."""
    tokens: int
    prompt_tokens: int
    timings: Mapping[str, Any] = field(default_factory=dict)
    """By the server's own clock (llama-server API 6); the worker does not pass them on."""

    @property
    def per_token(self) -> float | None:
        """Seconds from one token to the next; None if there is no next one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class Path(ABC):
    """A way to the server."""

    name: PathName

    def __init__(self) -> None:
        self._stopped = False
        self._lock = threading.Lock()
        self._running: set[Callable[[], object]] = set()

    @abstractmethod
    def stream(self, task: Task, prompt: str, ready: Callable[[], object]) -> Sample:
        """Run one stream to its end.

        :param ready: called when all is prepared; the stream begins when it returns
        :raises StreamFailed: if it did not come to a good one
        """

    def stop(self) -> None:
        """From another thread: end what runs and begin nothing more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for cut in running:
            cut()

    def _begin(self, cut: Callable[[], object]) -> None:
        with self._lock:
            if self._stopped:
                raise StreamFailed("stopped")
            self._running.add(cut)

    def _end(self, cut: Callable[[], object]) -> None:
        with self._lock:
            self._running.discard(cut)


class Direct(Path):
    """Straight to llama-server, with the body that the worker would send."""

    name = "direct"

    def __init__(self, upstream: Upstream, target: Target) -> None:
        super().__init__()
        self._upstream = upstream
        self._target = target

    def stream(self, task: Task, prompt: str, ready: Callable[[], object]) -> Sample:
        nobody = {"channel_id": "-", "access_key": "-", "direction": "write"}
        request = decode_stream({**task.payload(prompt), "writer_ref": nobody})
        body = chat_body(request, max_tokens=task.tokens, abilities=Abilities()).body
        call = Call(0, "stream", key=None, model=task.model)
        blocks: list[tuple[float, bytes]] = []

        def cut() -> object:
            return call.abort("stop")

        self._begin(cut)
        try:
            data = jsontext.dumpb({**body, "return_progress": True})
            ready()
            began = time.monotonic()
            with self._upstream.open_stream(self._target, COMPLETIONS, data, call) as stream:
                while block := stream.read():
                    blocks.append((time.monotonic() - began, block))
        except (ProviderError, Interrupted) as error:
            raise StreamFailed(str(error)) from error
        finally:
            self._end(cut)
        return read_direct(began, blocks)


class Through(Path):
    """Through engine and worker, as the router does it, but for the router."""

    name = "worker"

    def __init__(self, caller: Caller, settings: Settings) -> None:
        super().__init__()
        self._caller = caller
        self._settings = settings

    def stream(self, task: Task, prompt: str, ready: Callable[[], object]) -> Sample:
        # The channel is the caller's own business and made before the clock starts.
        refs = self._caller.call("engine::channels::create", {})
        try:
            socket = read_end(self._settings, refs["reader"])
        except (ConsumerGone, ProviderError) as error:
            raise StreamFailed(f"the answer's channel cannot be read: {error}") from error
        try:
            self._begin(socket.abort)
            return self._read(socket, {**task.payload(prompt), "writer_ref": refs["writer"]}, ready)
        finally:
            self._end(socket.abort)
            socket.shutdown()

    def _read(self, socket: Any, payload: dict[str, Any], ready: Callable[[], object]) -> Sample:
        failure: list[BusError] = []

        def ask() -> None:
            try:
                self._caller.call(
                    f"provider::{self._settings.id}::stream", payload, timeout=LONGEST
                )
            except BusError as error:
                failure.append(error)
                socket.abort()  # no frame will come

        asking = threading.Thread(target=ask, name="bench-ask", daemon=True)
        reader = FrameReader(_LARGEST_FRAME)
        frames: list[tuple[float, bytes]] = []
        receive: Callable[[int], bytes] = socket.sock.recv
        open_ = True
        ready()
        began = time.monotonic()
        asking.start()
        with suppress(OSError):  # what is missing then is told below
            while open_ and (block := receive(_READ)):
                now = time.monotonic() - began
                for opcode, data in reader.feed(block):
                    if opcode == TEXT:
                        frames.append((now, data))
                    elif opcode == PING:
                        socket.pong(data)
                    elif opcode == CLOSE:
                        open_ = False
        asking.join(1.0)
        if failure:
            raise StreamFailed(str(failure[0]))
        return read_frames(began, frames)


# -- looking into what arrived ----------------------------------------------------------------


def read_direct(began: float, blocks: Sequence[tuple[float, bytes]]) -> Sample:
    """The sample in a server's event stream.

    :param blocks: of its body, with their times
    :raises StreamFailed: for an error in it, and for one that ended early
    """
    cutter = EventCutter()
    first = last = None
    usage: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    for at, block in blocks:
        for item in cutter.feed(block):
            if not isinstance(item, bytes):
                raise StreamFailed(item.text.decode("utf-8", "replace").strip() or "no events")
            if item == b"[DONE]":
                continue
            chunk = jsontext.loads(item)
            if error := error_in(chunk):
                raise StreamFailed(str(classify(None, error)))
            usage, timings = chunk.get("usage") or usage, chunk.get("timings") or timings
            for choice in chunk.get("choices") or ():
                if first is None and _says(choice.get("delta") or {}):
                    first = at
                if choice.get("finish_reason"):
                    last = at
    if last is None:
        raise StreamFailed("llama-server ended the stream without a finish reason")
    counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
    return _sample(began, first, last, *counts, timings)


def read_frames(began: float, frames: Sequence[tuple[float, bytes]]) -> Sample:
    """The sample in a channel's frames.

    :raises StreamFailed: for an ``error`` frame, and where the last frame is missing
    """
    first = last = None
    for at, text in frames:
        frame = jsontext.loads(text)
        kind = frame["type"]
        if kind == "error":
            raise StreamFailed(str(frame["error"].get("error_message")))
        if first is None and kind.endswith("_delta"):
            first = at
        # The last block ends as soon as the finish reason is there.
        if kind.endswith("_end"):
            last = at
        if kind == "done":
            usage = frame["message"].get("usage") or {}
            return _sample(began, first, last, usage.get("output"), usage.get("input"), {})
    raise StreamFailed("the channel closed before the answer was whole")


def _says(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls"))


def _sample(
    began: float,
    first: float | None,
    last: float | None,
    tokens: object,
    prompt_tokens: object,
    timings: Mapping[str, Any],
) -> Sample:
    if first is None or last is None or not isinstance(tokens, int) or tokens < 1:
        raise StreamFailed("the answer had no text, or no count of its tokens")
    prompt = prompt_tokens if isinstance(prompt_tokens, int) else 0
    return Sample(began, first, last, tokens, prompt, timings)


# -- several at once --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Streams that were started together."""

    samples: Sequence[Sample]
    failures: Sequence[str] = ()

    def figures(self) -> dict[str, float]:
        """``first_ms``: to the first token. ``per_token_ms``: from one token to the next.
        ``each``, ``all``: tokens per second, of one stream and of all together.
        ``prompt``: tokens of the prompt by the time to the first token, as the caller sees it.
        Of the streams the median."""
        samples = self.samples
        if not samples:
            return {}
        ended = max(each.began + each.last for each in samples)
        found = {
            "first_ms": 1000 * statistics.median(each.first for each in samples),
            "all": sum(each.tokens for each in samples) / (ended - samples[0].began),
            "prompt": statistics.median(each.prompt_tokens / each.first for each in samples),
        }
        gaps = [each.per_token for each in samples if each.per_token is not None]
        if gaps:
            found["per_token_ms"] = 1000 * (gap := statistics.median(gaps))
            if gap:  # a short answer may have come in one read
                found["each"] = 1 / gap
        return found


def run_batch(path: Path, task: Task, count: int, chance: random.Random) -> Batch:
    """``count`` streams at once, to their ends. An interrupt stops them."""
    prompts = [task.prompt(chance) for _ in range(count)]
    samples: list[Sample] = []
    failures: list[str] = []
    together = threading.Barrier(count)

    def one(prompt: str) -> None:
        ready: list[int] = []
        try:
            samples.append(path.stream(task, prompt, lambda: ready.append(together.wait())))
        except threading.BrokenBarrierError:
            pass  # another one could not begin, and said why
        except (BusError, StreamFailed) as error:
            failures.append(str(error))
            if not ready:
                together.abort()

    with ThreadPoolExecutor(count, thread_name_prefix="bench") as pool:
        futures = [pool.submit(one, prompt) for prompt in prompts]
        try:
            for future in futures:
                future.result()
        except BaseException:
            together.abort()
            path.stop()
            raise
    samples.sort(key=lambda each: each.began)
    return Batch(samples, failures)
