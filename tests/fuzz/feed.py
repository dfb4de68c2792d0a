"""Takes values out of bytes, so that a fuzzer that knows bytes only can choose them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Feed:
    """The bytes of one try. Once they are used up, everything is 0, the first, or empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """From 0 to 255."""
        taken = self._data[self._at : self._at + 1]
        self._at += 1
        return taken[0] if taken else 0

    def below(self, limit: int) -> int:
        return self.byte() % limit

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def raw(self, most: int = 255) -> bytes:
        """Some bytes, as they stand."""
        count = min(self.byte(), most)
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def rest(self) -> bytes:
        taken = self._data[self._at :]
        self._at = len(self._data)
        return taken

    def text(self, most: int = 32) -> str:
        """Some text; what is no UTF-8 becomes half a surrogate pair."""
        return self.raw(most).decode("utf-8", "surrogateescape")

    def number(self) -> Any:
        """A number, and what passes for one."""
        if self.below(3):
            return self.byte() - 64
        return self.one_of(
            [0, 1.5, 2**53, -(2**63), 2**64, 1e300, -0.0, float("nan"), float("inf"), 10**400]
        )

    def value(self, depth: int = 4) -> Any:
        """A JSON value."""
        kind = self.below(8 if depth else 5)
        if kind in (5, 6):
            return {self.text(6): self.value(depth - 1) for _ in range(self.below(4))}
        if kind == 7:
            return [self.value(depth - 1) for _ in range(self.below(4))]
        if kind == 4:
            return self.number()
        return (None, True, False, self.text())[kind]

    def cut(self, data: bytes) -> list[bytes]:
        """``data`` in pieces."""
        marks = sorted(self.byte() * (len(data) + 1) // 256 for _ in range(self.below(6)))
        edges = [0, *marks, len(data)]
        return [data[start:stop] for start, stop in itertools.pairwise(edges)]
