"""Function ids as tool names that llama-server takes, and back.

An id such as ``fs::read`` goes out as ``fs__read``. Text replacement alone cannot bring back an id
that holds ``__`` itself, nor tell ``a::b`` from ``a__b``: each request keeps its own table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from zlib import crc32

LONGEST = 128
"""The upstream pattern is ``^[a-zA-Z0-9_-]{1,128}$`` (provider protocol 8.1)."""

_FOREIGN = re.compile(r"[^a-zA-Z0-9_-]")


class NameTable:
    """The names of one request: every id has its own, and a name leads back to its id.

    An id gets the same name in every request unless another id wants it too, so that the prompt
    stays the same from turn to turn and the server's prompt cache holds.

    :param ids: ids of the offered functions; of two that want one name, the one that reads back
        by replacement alone gets it, otherwise the first
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        known = list(ids)
        for id in known:
            plain = _plain(id)
            if plain.replace("__", "::") == id and plain not in self._ids:
                self._add(id, plain)
        for id in known:
            self.encode(id)

    def encode(self, id: str) -> str:
        """The name of ``id``; an id that is not in the table yet is added."""
        name = self._names.get(id)
        if name is None:
            name = _plain(id)
            attempt = 0
            while name in self._ids:
                name = _marked(id, attempt)
                attempt += 1
            self._add(id, name)
        return name

    def decode(self, name: str) -> str:
        """The id that ``name`` stands for; a name nobody gave out has ``__`` read as ``::``."""
        id = self._ids.get(name)
        return name.replace("__", "::") if id is None else id

    def _add(self, id: str, name: str) -> None:
        self._names[id] = name
        self._ids[name] = id


def _plain(id: str) -> str:
    name = _FOREIGN.sub("_", id.replace("::", "__")) or "_"
    return name if len(name) <= LONGEST else _marked(id, 0)


def _marked(id: str, attempt: int) -> str:
    """A name with a checksum of the id in it, for ids that are too long or come second."""
    seed = f"{attempt}:{id}" if attempt else id
    checksum = crc32(seed.encode("utf-8", "surrogatepass"))
    name = _FOREIGN.sub("_", id.replace("::", "__"))
    return f"{name[: LONGEST - 9]}_{checksum:08x}"
