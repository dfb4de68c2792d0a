"""What a case expects of a call, one function per key of ``expect``.

Pure: everything that was seen lies in a :class:`~case_seen.Seen`, and a check says in words what
does not hold. A key without a check is a fault of the run, never skipped: a prose key must be
listed for the very case it stands in (:data:`PROSE`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from case_seen import TERMINALS, Request, Seen
from laws import check_frames

Expect = dict[str, Any]

DELTAS = ("text_delta", "thinking_delta", "functioncall_delta")

Check = Callable[[Seen, Any, Expect], "str | Iterator[str] | None"]
_CHECKS: dict[str, Check] = {}


def _check(function: Check) -> Check:
    _CHECKS[function.__name__.strip("_")] = function
    return function


def problems(seen: Seen, expect: Expect, case_id: str = "") -> list[str]:
    """What of ``expect`` does not hold, one sentence each.

    :raises KeyError: for a key nobody has written a check for
    """
    found: list[str] = []
    for key, wanted in expect.items():
        check = PROSE.get((case_id, key)) or _CHECKS.get(key)
        if check is None:
            raise KeyError(f"{case_id}: no check is written for the key {key!r}")
        outcome = check(seen, wanted, expect)
        words = [outcome] if isinstance(outcome, str) else list(outcome or ())
        found += [f"{key}: {word}" for word in words]
    return found


def _differs(got: object, wanted: object) -> str | None:
    return None if got == wanted else f"{got!r}, wanted {wanted!r}"


# --- frames ----------------------------------------------------------------------------------


@_check
def terminal(seen: Seen, wanted: str | None, _: Expect) -> str | None:
    if wanted is None:
        return None
    return _differs(seen.terminal and seen.terminal["type"], wanted)


@_check
def not_(seen: Seen, wanted: list[str], _: Expect) -> Iterator[str]:
    yield from (f"a {kind} frame came" for kind in wanted if seen.of(kind))


@_check
def stop_reason(seen: Seen, wanted: str, _: Expect) -> str | None:
    return _differs(seen.message.get("stop_reason"), wanted)


@_check
def native_stop_reason(seen: Seen, wanted: str, _: Expect) -> str | None:
    return _differs(seen.message.get("native_stop_reason"), wanted)


@_check
def error_kind(seen: Seen, wanted: str, _: Expect) -> str | None:
    return _differs(seen.message.get("error_kind"), wanted)


@_check
def error_message_contains(seen: Seen, wanted: list[str], _: Expect) -> Iterator[str]:
    yield from (
        f"{w!r} not in {seen.error_message!r}" for w in wanted if w not in seen.error_message
    )


@_check
def error_message_max_len(seen: Seen, wanted: int, _: Expect) -> str | None:
    length = len(seen.error_message)
    return None if 0 < length <= wanted else f"{length} characters"


def _same_block(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    got, wanted = dict(got), dict(wanted)
    if wanted.get("id") == "*":
        del wanted["id"]
        if not got.pop("id", None):
            return False
    return got == wanted


def _same_content(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> bool:
    return len(got) == len(wanted) and all(map(_same_block, got, wanted))


@_check
def content(seen: Seen, wanted: list[dict[str, Any]], _: Expect) -> str | None:
    return None if _same_content(seen.content, wanted) else f"{seen.content}, wanted {wanted}"


@_check
def content_prefix(seen: Seen, wanted: list[dict[str, Any]], _: Expect) -> str | None:
    start = seen.content[: len(wanted)]
    return None if _same_content(start, wanted) else f"{seen.content}, wanted first {wanted}"


@_check
def content_contains(seen: Seen, wanted: list[dict[str, Any]], _: Expect) -> Iterator[str]:
    for block in wanted:
        if not any(_same_block(each, block) for each in seen.content):
            yield f"{block} not in {seen.content}"


@_check
def content_any_of(seen: Seen, wanted: list[list[dict[str, Any]]], _: Expect) -> str | None:
    fits = any(_same_content(seen.content, each) for each in wanted)
    return None if fits else f"{seen.content}, wanted one of {wanted}"


@_check
def joined(seen: Seen, wanted: dict[str, str], _: Expect) -> Iterator[str]:
    for kind, text in wanted.items():
        got = "".join(block["text"] for block in seen.content if block["type"] == kind)
        if got != text:
            yield f"{kind} {got!r}, wanted {text!r}"


@_check
def usage(seen: Seen, wanted: dict[str, Any], _: Expect) -> Iterator[str]:
    got = seen.message.get("usage") or {}
    yield from (f"{k} {got.get(k)!r}, wanted {v!r}" for k, v in wanted.items() if got.get(k) != v)


@_check
def usage_input_any_of(seen: Seen, wanted: list[int], _: Expect) -> str | None:
    got = (seen.message.get("usage") or {}).get("input")
    return None if got in wanted else f"{got!r}, wanted one of {wanted}"


@_check
def event_counts(seen: Seen, wanted: dict[str, int], _: Expect) -> Iterator[str]:
    counts = Counter(frame.get("type") for frame in seen.frames)
    yield from (f"{counts[k]} x {k}, wanted {v}" for k, v in wanted.items() if counts[k] != v)


@_check
def event_order(seen: Seen, wanted: list[str], _: Expect) -> str | None:
    kinds = [frame.get("type") for frame in seen.frames]
    left = iter(kinds)
    return None if all(kind in left for kind in wanted) else f"{kinds}, wanted in it {wanted}"


@_check
def any_of(seen: Seen, wanted: list[Expect], _: Expect) -> str | None:
    faults = [problems(seen, each) for each in wanted]
    return None if not all(faults) else f"none holds: {faults}"


@_check
def not_empty_success(seen: Seen, wanted: bool, _: Expect) -> str | None:
    empty = bool(seen.of("done")) and not seen.content
    return "a done without content" if wanted and empty else None


@_check
def calls_degraded(seen: Seen, wanted: bool, _: Expect) -> Iterator[str]:
    for call in seen.calls if wanted else ():
        if not {"_partial", "_raw"} & set(call["arguments"]):
            yield f"{call} carries neither _partial nor _raw"


@_check
def unique_call_ids(seen: Seen, wanted: bool, _: Expect) -> str | None:
    ids = [call["id"] for call in seen.calls]
    return f"{ids}" if wanted and len(set(ids)) < len(ids) else None


@_check
def no_empty_calls(seen: Seen, wanted: bool, _: Expect) -> Iterator[str]:
    for call in seen.calls if wanted else ():
        if not call["id"] or not call["function_id"]:
            yield f"{call}"


@_check
def call_count_max(seen: Seen, wanted: int, _: Expect) -> str | None:
    return None if len(seen.calls) <= wanted else f"{len(seen.calls)} calls"


@_check
def pings_min(seen: Seen, wanted: int, _: Expect) -> str | None:
    pings = len(seen.of("ping"))
    return None if pings >= wanted else f"{pings} pings, wanted {wanted}"


# --- invariants ------------------------------------------------------------------------------


@_check
def invariants(seen: Seen, wanted: list[str], _: Expect) -> Iterator[str]:
    for name in wanted:
        yield from (f"{name}: {word}" for word in _INVARIANTS[name](seen))
    # The whole law book of the project, stricter than the names above.
    try:
        check_frames([text.encode() for text in seen.texts])
    except AssertionError as broken:
        yield f"law: {broken}"


def _start_first(seen: Seen) -> Iterator[str]:
    kinds = [kind for frame in seen.frames if (kind := frame.get("type")) != "ping"]
    if kinds and kinds[0] != "start" and kinds != ["error"]:
        yield f"{kinds}"
    if kinds.count("start") > 1:
        yield "more than one start"


def _one_terminal(seen: Seen) -> Iterator[str]:
    if len(seen.of(*TERMINALS)) != 1:
        yield f"{len(seen.of(*TERMINALS))} terminals"


def _terminal_last(seen: Seen) -> Iterator[str]:
    if not seen.frames or seen.frames[-1].get("type") not in TERMINALS:
        yield f"{[frame.get('type') for frame in seen.frames]}"


def _balanced_blocks(seen: Seen) -> Iterator[str]:
    opened: str | None = None
    for frame in seen.frames:
        block, _, part = str(frame.get("type")).partition("_")
        if part == "start":
            if opened is not None:
                yield f"{block} opened inside {opened}"
            opened = block
        elif part in ("delta", "end"):
            if opened != block:
                yield f"{block}_{part} while {opened} is open"
            opened = None if part == "end" else opened
    if opened is not None:
        yield f"{opened} was never closed"


def _frames_strict_json(seen: Seen) -> Iterator[str]:
    for text in seen.texts:
        try:
            frame = json.loads(text, parse_constant=_refuse)
            json.dumps(frame, ensure_ascii=False).encode()
        except ValueError as error:
            yield f"{error}: {text[:200]}"
        else:
            if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
                yield f"not an event: {text[:200]}"


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


_INVARIANTS: dict[str, Callable[[Seen], Iterator[str]]] = {
    "start_first": _start_first,
    "one_terminal": _one_terminal,
    "terminal_last": _terminal_last,
    "balanced_blocks": _balanced_blocks,
    "frames_strict_json": _frames_strict_json,
}


# --- the wire --------------------------------------------------------------------------------


def _pointed(document: Any, pointer: str) -> Any:
    """The value at a JSON pointer. :raises LookupError: if there is none"""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


@_check
def request_json(seen: Seen, wanted: dict[str, Any], _: Expect) -> Iterator[str]:
    if not seen.requests:
        yield "no request was made"
        return
    body = seen.requests[-1].json
    for pointer, value in wanted.items():
        try:
            got = _pointed(body, pointer)
        except (LookupError, TypeError):
            yield f"{pointer} is not in {body}"
        else:
            if got != value:
                yield f"{pointer} is {got!r}, wanted {value!r}"


@_check
def request_json_absent(seen: Seen, wanted: list[str], _: Expect) -> Iterator[str]:
    if not seen.requests:
        yield "no request was made"
        return
    for pointer in wanted:
        try:
            yield f"{pointer} is {_pointed(seen.requests[-1].json, pointer)!r}"
        except (LookupError, TypeError):
            continue


@_check
def upstream_requests(seen: Seen, wanted: int, _: Expect) -> str | None:
    return _differs(len(seen.requests), wanted)


@_check
def connections(seen: Seen, wanted: int, _: Expect) -> str | None:
    return _differs(len({request.connection for request in seen.requests}), wanted)


@_check
def proxy_requests(seen: Seen, wanted: int, _: Expect) -> str | None:
    return _differs(seen.proxy_requests, wanted)


def _headers(requests: list[Request], wanted: dict[str, str | None]) -> Iterator[str]:
    if not requests:
        yield "no request was made"
    for request in requests:
        for name, value in wanted.items():
            if (got := request.headers.get(name.lower())) != value:
                yield f"{request.path}: {name} is {got!r}, wanted {value!r}"


@_check
def upstream_request_header(seen: Seen, wanted: dict[str, str | None], _: Expect) -> Iterator[str]:
    return _headers(seen.requests[-1:], wanted)


@_check
def every_request_header(seen: Seen, wanted: dict[str, str | None], _: Expect) -> Iterator[str]:
    return _headers(seen.all_requests, wanted)


@_check
def no_request_matching(seen: Seen, wanted: list[str], _: Expect) -> Iterator[str]:
    for request in seen.all_requests:
        yield from (f"{request.path} fits {w}" for w in wanted if re.search(w, request.path))


def _closed_within(seen: Seen, milliseconds: float) -> str | None:
    if seen.aborted_at is None or seen.upstream_closed_at is None:
        return "the server never saw the connection close"
    took = (seen.upstream_closed_at - seen.aborted_at) * 1000
    return None if took <= milliseconds else f"{took:.0f} ms"


@_check
def upstream_closed_within_ms(seen: Seen, wanted: float, _: Expect) -> str | None:
    return _closed_within(seen, wanted)


# --- calls -----------------------------------------------------------------------------------


@_check
def call_fails(seen: Seen, wanted: bool, _: Expect) -> str | None:
    return _differs(seen.failure is not None, wanted)


@_check
def embeddings(seen: Seen, wanted: list[list[float]], _: Expect) -> str | None:
    return _differs((seen.result or {}).get("embeddings"), wanted)


@_check
def reconciled(seen: Seen, wanted: bool, _: Expect) -> str | None:
    return _differs(seen.reconciled is not None, wanted)


@_check
def models(seen: Seen, wanted: list[dict[str, Any]], expect: Expect) -> Iterator[str]:
    rows = {row["id"]: row for row in seen.reconciled or []}
    ids = [row["id"] for row in wanted]
    got = list(rows)
    if expect.get("models_order_any"):
        ids, got = sorted(ids), sorted(got)
    if got != ids:
        yield f"ids {got}, wanted {ids}"
    for row in wanted:
        for key, value in row.items():
            if (found := rows.get(row["id"], {}).get(key)) != value:
                yield f"{row['id']}: {key} is {found!r}, wanted {value!r}"


@_check
def models_order_any(seen: Seen, wanted: bool, expect: Expect) -> str | None:
    return None if wanted and "models" in expect else "stands beside no list of models"


@_check
def each_model(seen: Seen, wanted: dict[str, Any], _: Expect) -> Iterator[str]:
    for row in seen.reconciled or []:
        for key, value in wanted.items():
            if key.endswith("_lt"):
                if not row[key[:-3]] < row[value]:
                    yield f"{row['id']}: {key[:-3]} is not below {value}"
            elif row.get(key) != value:
                yield f"{row['id']}: {key} is {row.get(key)!r}, wanted {value!r}"


@_check
def abort_result(seen: Seen, wanted: dict[str, bool], _: Expect) -> str | None:
    return _differs([{"aborted": each} for each in seen.abort_results], [wanted])


@_check
def abort_results(seen: Seen, wanted: list[bool], _: Expect) -> str | None:
    return _differs(seen.abort_results, wanted)


@_check
def abort_returns_within_ms(seen: Seen, wanted: float, _: Expect) -> Iterator[str]:
    if not seen.abort_seconds:
        yield "nothing was aborted"
    yield from (f"{s * 1000:.0f} ms" for s in seen.abort_seconds if s * 1000 > wanted)


@_check
def no_events_after_abort(seen: Seen, wanted: list[str], _: Expect) -> str | None:
    late = [frame["type"] for frame in seen.frames[seen.frames_at_abort :]]
    late = [kind for kind in late if kind in wanted]
    return f"{late} after the abort" if late else None


@_check
def registry_empty_after(seen: Seen, wanted: bool, _: Expect) -> str | None:
    return _differs(seen.active_after == 0, wanted)


@_check
def second_call(seen: Seen, wanted: Expect, _: Expect) -> list[str] | str:
    return problems(seen.later[0], wanted) if seen.later else "it was not made"


@_check
def next_call(seen: Seen, wanted: Expect, _: Expect) -> list[str] | str:
    return problems(seen.later[-1], wanted) if seen.later else "it was not made"


@_check
def worker_survives(seen: Seen, wanted: bool, _: Expect) -> str | None:
    alive = bool(seen.later) and seen.later[-1].terminal is not None
    return _differs(alive, wanted)


LATER_KEYS = ("second_call", "next_call", "worker_survives")
"""Keys that need another call after the first."""


# --- prose, by case --------------------------------------------------------------------------


def _usage_optional(seen: Seen, wanted: bool, _: Expect) -> str | None:
    """Usage may be missing; where it is there it must be a plain object of numbers."""
    counts = seen.message.get("usage")
    fits = counts is None or all(isinstance(value, int) for value in counts.values())
    return None if wanted and fits else f"{counts}"


def _max_rss_growth_mb(seen: Seen, wanted: int, _: Expect) -> str | None:
    grown = seen.rss_growth / 2**20
    return None if grown <= wanted else f"{grown:.0f} MB"


def _arguments_are_objects(seen: Seen, _wanted: str, _: Expect) -> Iterator[str]:
    """Every ``tool_calls[].function.arguments`` is a string that parses to a JSON object."""
    calls = [
        call
        for message in seen.requests[-1].json["messages"]
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        yield "the request holds no tool call"
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str) or not isinstance(json.loads(arguments), dict):
            yield f"{arguments!r}"


def _delta_latency(seen: Seen, wanted: float, _: Expect) -> Iterator[str]:
    """Each delta reaches the caller within so many milliseconds of the server's write."""
    deltas = [
        at for frame, at in zip(seen.frames, seen.arrivals, strict=True) if frame["type"] in DELTAS
    ]
    if len(deltas) != len(seen.sent_at) or not deltas:
        yield f"{len(deltas)} deltas of {len(seen.sent_at)} writes"
        return
    for sent, came in zip(seen.sent_at, deltas, strict=True):
        if (came - sent) * 1000 > wanted:
            yield f"{(came - sent) * 1000:.0f} ms"


PROSE: dict[tuple[str, str], Check] = {
    ("sse-chunked-cut-after-text", "usage_optional"): _usage_optional,
    ("tc-sparse-index", "max_rss_growth_mb"): _max_rss_growth_mb,
    ("cv-arguments-always-valid-json", "request_check"): _arguments_are_objects,
    ("tr-close-framed-latency", "delta_latency_ms_max"): _delta_latency,
}
"""Keys that only words explain, each with its check, for the case it stands in. The bus cases
have scenes of their own (:mod:`case_runner`) that check theirs."""
