"""The tool calls of one answer, put together from fragments (provider protocol 6.1). No frames."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .. import jsontext
from ..transcript.arguments import parse_arguments
from .slices import Slices

MAX_INDEX = 128
"""The highest index that is read (provider protocol 13), and one less than the calls kept."""


class ToolCall:
    """One call.

    :param own: makes an id that no other call of the answer has, of the one that was given
    :attr id: as the server gave it, or made up once it had to be shown; empty until then. One that
        another call has already is made up too: deltas and results are told apart by it
    :attr server_id: as the server gave it, empty if it gave none
    :attr name: as the server gave it (encoded); empty until it came
    """

    __slots__ = ("_encoded", "_own", "_size", "arguments", "id", "index", "name", "server_id")

    def __init__(self, index: int, own: Callable[[str], str]) -> None:
        self.index = index
        self.id = ""
        self.server_id = ""
        self.name = ""
        self.arguments = Slices()
        self._own = own
        self._encoded = b""
        self._size = -1

    def absorb(self, fragment: dict[str, Any]) -> bool:
        """Take id and name from ``fragment``; whether one of them was new."""
        given, name = id_of(fragment), name_of(fragment)
        changed = False
        if given and not self.server_id:
            self.server_id = given
            # One that was made up and shown is kept.
            self.id = self.id or self._own(jsontext.whole(given))
            changed = True
        if name and not self.name:
            self.name = name
            changed = True
        return changed

    def encoded_arguments(self, cut: bool) -> bytes:
        """The arguments so far as a JSON object (provider protocol 8.2)."""
        joined = self.arguments.joined()
        if cut and not joined:
            return b'{"_partial":true}'
        if len(joined) != self._size:
            self._size = len(joined)
            self._encoded = jsontext.dumpb(parse_arguments(self.arguments.text()))
        return self._encoded


class ToolCalls:
    """All calls of one answer.

    :param decode_name: the server's name of a tool -> its function id
    :param call_id: makes an id for a call that came without one
    """

    def __init__(self, decode_name: Callable[[str], str], call_id: Callable[[], str]) -> None:
        self._decode_name = decode_name
        self._call_id = call_id
        self._all: list[ToolCall] = []
        self._ids: set[str] = set()
        # The newest call of each index, and of all; None is one that is ignored.
        self._newest: dict[int, ToolCall | None] = {}
        self._last: ToolCall | None = None

    def __bool__(self) -> bool:
        """Whether a call is there that can be shown."""
        return any(call.name for call in self._all)

    @property
    def pieces(self) -> int:
        """Argument pieces of all calls."""
        return sum(call.arguments.count for call in self._all)

    def place(self, fragment: dict[str, Any], position: int | None = None) -> ToolCall | None:
        """The call that ``fragment`` belongs to, made if it is new; None if it is to be ignored.

        :param position: the index of a fragment that names none
        """
        index = fragment.get("index")
        if type(index) is not int:
            index = position
        if index is not None and not 0 <= index <= MAX_INDEX:
            self._last = None
        elif index is None:
            self._last = self._without_index(fragment)
        elif index not in self._newest or _opens(self._newest[index], fragment):
            self._last = self._open(index)
        else:
            self._last = self._newest[index]
        return self._last

    def _without_index(self, fragment: dict[str, Any]) -> ToolCall | None:
        last = self._last
        given = id_of(fragment)
        if not self._all or (given and (last is None or given != last.server_id)):
            # Behind all others: calls without an index are ordered by their arrival.
            return self._open(max(self._newest, default=0))
        return self._open(last.index) if _opens(last, fragment) and last else last

    def _open(self, index: int) -> ToolCall | None:
        if len(self._all) > MAX_INDEX:
            self._newest[index] = None
            return None
        call = ToolCall(index, self._own)
        self._newest[index] = call
        self._all.append(call)
        return call

    def _own(self, given: str) -> str:
        """``given`` if it is one, and no other call has it; else one that is made up."""
        name = self._call_id() if not given or given in self._ids else given
        self._ids.add(name)
        return name

    def encoded(self, *, cut: bool) -> list[bytes]:
        """The content blocks of the calls that have a name, by index, then by arrival.

        :param cut: the answer broke off: a call without arguments yet must not look like a whole
            one that takes none
        """
        blocks = []
        for call in sorted(self._all, key=lambda each: each.index):
            if call.name:
                call.id = call.id or self._own("")
                blocks.append(
                    b'{"type":"function_call","id":%b,"function_id":%b,"arguments":%b}'
                    % (
                        jsontext.dumpb(call.id),
                        jsontext.dumpb(self._decode_name(call.name)),
                        call.encoded_arguments(cut),
                    )
                )
        return blocks


def _opens(newest: ToolCall | None, fragment: dict[str, Any]) -> bool:
    """Whether ``fragment`` begins a call of its own where ``newest`` is the one to go on with."""
    given, name = id_of(fragment), name_of(fragment)
    if newest is None:
        return bool(given)
    if given and newest.server_id:
        return given != newest.server_id
    # Without ids, only another name tells two whole calls apart.
    return bool(name and newest.name and name != newest.name and newest.arguments)


def _function(fragment: dict[str, Any]) -> dict[str, Any]:
    function = fragment.get("function")
    return function if isinstance(function, dict) else {}


def name_of(fragment: dict[str, Any]) -> str:
    """The tool's name in a fragment, empty if it has none."""
    name = _function(fragment).get("name")
    return name if isinstance(name, str) else ""


def id_of(fragment: dict[str, Any]) -> str:
    """The id of a fragment, empty if it has none; llama-server b5478 to b5497 had it inside."""
    for holder in (fragment, _function(fragment)):
        value = holder.get("id")
        if isinstance(value, str) and value:
            return value
    return ""


def arguments_of(fragment: dict[str, Any]) -> str:
    """The argument text of a fragment, empty if it has none."""
    value = _function(fragment).get("arguments")
    if value is None or isinstance(value, str):
        return value or ""
    # An object, as servers of another native shape send it, whole.
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return "arguments nested too deep"  # not JSON, so they are shown raw


def argument_holder(fragment: object) -> dict[str, Any] | None:
    """The object whose ``arguments`` are all that a fragment of a known call carries, else None."""
    if not isinstance(fragment, dict) or id_of(fragment) or name_of(fragment):
        return None
    index = fragment.get("index")
    known = type(index) is int and 0 <= index <= MAX_INDEX
    return _function(fragment) if known else None
