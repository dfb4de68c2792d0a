"""Text that grows, kept as the inside of a JSON string in pieces. Knows no frames.

A delta arrives as JSON text and leaves as JSON text. So a block keeps the bytes between the quotes,
as they were sent on, and a message is built by joining them: nothing is decoded and encoded again.
"""

from __future__ import annotations

from json.encoder import encode_basestring

from .. import jsontext


def inside(text: str) -> bytes:
    """``text`` as JSON has it between quotes, in UTF-8; a lone surrogate becomes U+FFFD."""
    try:
        return encode_basestring(text)[1:-1].encode()
    except UnicodeEncodeError:
        return encode_basestring(jsontext.whole(text))[1:-1].encode()


class Slices:
    """One text.

    :attr pieces: the newest pieces; whoever appends to it keeps to valid JSON string content
    """

    __slots__ = ("_chunks", "_counted", "_half", "pieces")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._chunks: list[bytes] = []
        self._counted = 0
        self._half = ""

    def __bool__(self) -> bool:
        return bool(self.pieces or self._chunks)

    @property
    def count(self) -> int:
        """How many pieces there have been."""
        return self._counted + len(self.pieces)

    @property
    def waiting(self) -> bool:
        """The first half of a surrogate pair is held back until its second half comes."""
        return bool(self._half)

    def add(self, text: str) -> bytes:
        """Append ``text``; the piece it became, empty if all of it is held back."""
        text = self._half + text
        self._half = ""
        if "\ud800" <= text[-1:] <= "\udbff":
            self._half, text = text[-1], text[:-1]
        return self._append(text)

    def flush(self) -> bytes:
        """No second half will come: the piece that stands for the first, empty if there is none."""
        text, self._half = self._half, ""
        return self._append(text)

    def _append(self, text: str) -> bytes:
        piece = inside(text)
        if piece:
            self.pieces.append(piece)
        return piece

    def compact(self) -> None:
        """Make one piece of the newest ones: a hundred thousand small objects are costly."""
        if not self.pieces:
            return
        self._counted += len(self.pieces)
        self._chunks.append(b"".join(self.pieces))
        self.pieces.clear()

    def joined(self) -> bytes:
        """The whole text as JSON has it between quotes."""
        self.compact()
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""

    def text(self) -> str:
        """The whole text."""
        value: str = jsontext.loads(b'"' + self.joined() + b'"')
        return value
