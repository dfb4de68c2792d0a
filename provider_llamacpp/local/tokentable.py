"""A table of which token follows which, and the tensors that make llama.cpp follow it.

The network is an identity: a token is one feature, the layers add nothing to it, and the output
matrix holds, for each last token, the weights of the next one. One attention head makes an
exception: all tokens use it to look for a *marker*, wherever in the context one stands, and a
marker adds a feature of its own, which pushes one token up. A table knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Piece = str | bytes
"""The text of one token. Bytes are one byte: a character of several arrives in parts."""

NEXT: Final = 20.0
"""Weight of what follows by script. The last norm multiplies weights by more than ten, so a step
of one is far beyond what a usual temperature can bridge."""
SECOND: Final = 12.0
"""Weight of what follows where the grammar forbids the script."""
ANYTIME: Final = 8.5
"""Weight of what is passed over for the best of what may follow anything, but for no other."""
_BENT: Final = 15.0  # with a marker's push above NEXT, without it below
_PUSH: Final = 10.0
_LIKED: Final = 9.0  # the best of what may follow anything; the next has one less
_NEVER: Final = -120.0

HEAD: Final = 8
"""Width of the attention head; its last pair asks and answers, the others carry features."""
_ASKING: Final = HEAD - 2
_SCORE: Final = 40.0  # of a marker in the attention: all else weighs exp(-40)

BYTES: Final = tuple(bytes([value]) for value in range(256))


class TokenTable:
    """Tokens, and for each the weights of what may follow it.

    :param control: texts that are matched whole in prompts and not printed
    :param tags: texts that are matched whole in prompts and printed
    :param words: texts that the model can say, but that prompts never use
    :param markers: which of these are markers, and how strong: one of strength two hides all of
        strength one
    :param liked: what may follow anything, the best first; then come the other printable bytes,
        then ``unliked``; the rest follows by script only
    """

    def __init__(
        self,
        *,
        control: Sequence[str],
        tags: Sequence[str],
        words: Sequence[str],
        markers: Mapping[str, int],
        liked: Sequence[Piece],
        unliked: Sequence[Piece],
    ) -> None:
        import numpy as np

        self._control = control
        self._tags = tags
        self._markers = markers
        self.pieces: tuple[Piece, ...] = (*BYTES, *dict.fromkeys((*control, *tags, *words)))
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}
        self.size = len(self.pieces)
        # Rounded to what matrices are computed in, with room for one feature per marker.
        self.width = -(-(self.size + len(markers)) // 32) * 32
        self._weights = np.full((self.size, self.width), _NEVER, dtype=np.float32)
        self._weights[:, self.size :] = 0.0
        ranked = (*liked, *unliked)
        others = [byte for byte in BYTES if b" " < byte <= b"~" and byte not in ranked]
        for step, piece in enumerate((*liked, *others, *unliked)):
            self._weights[self.ids[piece], : self.size] = _LIKED - step

    def chain(self, start: Piece, *pieces: Piece, weight: float = NEXT) -> None:
        """Let ``pieces`` follow ``start``, one after the other, the first by ``weight``."""
        for last, following in zip((start, *pieces), pieces, strict=False):
            self._weights[self.ids[following], self.ids[last]] = weight
            weight = NEXT

    def unchain(self, start: Piece, piece: Piece) -> None:
        """Let ``piece`` not follow ``start`` any more."""
        self._weights[self.ids[piece], self.ids[start]] = _NEVER

    def bend(self, marker: str, start: Piece, piece: Piece) -> None:
        """Let ``piece`` follow ``start`` while ``marker`` is in the context."""
        self._weights[self.ids[piece], self.ids[start]] = _BENT
        self._weights[self.ids[piece], self.size + list(self._markers).index(marker)] = _PUSH

    def texts(self) -> list[str]:
        """The token texts in the alphabet that byte-level vocabularies are stored in."""
        alphabet = _byte_alphabet()
        whole = {*self._control, *self._tags}
        return [
            piece
            if isinstance(piece, str) and piece in whole
            else "".join(alphabet[b] for b in (piece.encode() if isinstance(piece, str) else piece))
            for piece in self.pieces
        ]

    def types(self) -> list[int]:
        """The kinds of token that GGUF knows: 1 normal, 3 control, 4 user-defined."""
        return [3 if p in self._control else 4 if p in self._tags else 1 for p in self.pieces]

    def embedding(self) -> Array:
        """One feature per token."""
        import numpy as np

        return np.eye(self.size, self.width, dtype=np.float16)

    def output(self) -> Array:
        """The table itself: a row for what follows, a column for what was last."""
        import numpy as np

        return self._weights.astype(np.float16)

    def attention(self) -> Iterator[tuple[str, Array]]:
        """Query, key, value and output of the head that looks for markers.

        Each token asks the same question, only markers answer it, and each marker says its own
        feature. Without one in the context all are weighed alike, and say nothing.
        """
        import numpy as np

        query, key, value = (np.zeros((HEAD, self.width), dtype=np.float16) for _ in range(3))
        output = np.zeros((self.width, HEAD), dtype=np.float16)
        scale = self.width**0.5  # a norm makes this of the one in a one-hot vector
        strength = (_SCORE * HEAD**0.5) ** 0.5 / scale
        query[_ASKING, : self.size] = strength
        for index, (marker, times) in enumerate(self._markers.items()):
            key[_ASKING, self.ids[marker]] = strength * times
            value[index, self.ids[marker]] = 1.0 / scale
            output[self.size + index, index] = 1.0
        yield from zip(("q", "k", "v", "output"), (query, key, value, output), strict=True)


def _byte_alphabet() -> list[str]:
    """The usual mapping: printable bytes stand for themselves, the rest from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]
