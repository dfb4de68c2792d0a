"""Writes the tiny GGUF models that the embedded stack and the tests run on.

They are real files for the real llama.cpp, but no language models: the network passes the last
token through, and the output matrix is a table that says which token follows. So the answers are
exact and repeatable, while sampler, grammar, chat template and parsers of the server do their
usual work. One attention head looks for a marker that the chat template puts into the prompt
(asked for the weather, a tool has answered, ...), and a marker bends the table at one place.

What the demo model does, at any usual temperature:

* recites :data:`SENTENCE`; with ``enable_thinking`` it first thinks :data:`THOUGHT`;
* with tools, and "weather" in the last user text, calls ``get_weather`` for :data:`CITY`; with
  "both" in it too, calls twice (:data:`CITY`, :data:`SECOND_CITY`);
* after a tool result says :data:`AFTER_TOOL`;
* with "forever" in the last user text repeats :data:`LOOP` without end, with "ponder" and
  thinking on thinks :data:`PONDER` without end;
* continues any other text (a raw prompt, an assistant message to go on with) with
  :data:`CONTINUATION`;
* under a JSON grammar closes everything as soon as it may: ``{"name":"","age":1}``;
* as an embedding model (mean pooling) tells texts apart by the letters they hold.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from .template import chat_template, plain_template

if TYPE_CHECKING:
    import numpy as np

Variant = Literal[
    "demo", "slow", "heavy", "loop", "think", "tool", "tools", "plain", "embed", "broken"
]
"""``slow``: the demo with many layers. ``heavy``: slow to load. ``loop``, ``think``: never ends.
``tool``, ``tools``: one or two calls whenever tools are given. ``plain``: a template that knows
neither tools nor thinking. ``embed``: random weights. ``broken``: cut in the middle."""
VARIANTS: Final[tuple[Variant, ...]] = get_args(Variant)

Piece = str | bytes

# Each piece is one token; a bytes piece is a single byte, so that a character arrives in parts.
# The last token alone decides what follows: no piece may occur in two places.
_SENTENCE: Final[tuple[Piece, ...]] = (
    *("Hello", "! I", " am", " a very", " small", " llama ", b"\xf0", b"\x9f", b"\xa6", b"\x99"),
    *(", no", " bigger", " than a", " caf", b"\xc3", b"\xa9", " photo", ", yet", " a real"),
    *(" server", " streams", " each", " of", " these", " words", " to you."),
)
_THOUGHT: Final = ("Someone", " greets", " me", "; a", " short", ", friendly", " line", " fits.")
_AFTER_TOOL: Final = ("The", " tool", " has", " answered", ", and", " all", " is", " well.")
_LOOP: Final = ("one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ")
_PONDER: Final = ("perhaps ", "or ", "maybe ", "not ", "after ", "some ", "more ", "thought ")
# The newline keeps it out of every JSON string, so that it cannot spoil a constrained answer.
_CONTINUATION: Final = (",\nand so on", ", until", " the", " end.")
_CALL: Final = (
    *("<tool_call>", '\n{"name": "', "get_weather", '", "arguments": {"city": "', "Pa", "ris"),
    *('"}}\n', "</tool_call>"),
)
_SECOND_CALL: Final = (
    *('\n<tool_call>\n{"name": "get_', 'weather", "arguments": ', '{"city":', ' "Ro', 'me"'),
    *("}}\n</tool", "_call>"),
)


def _text(pieces: Sequence[Piece]) -> str:
    return b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces).decode()


SENTENCE: Final = _text(_SENTENCE)
THOUGHT: Final = _text(_THOUGHT)
AFTER_TOOL: Final = _text(_AFTER_TOOL)
CONTINUATION: Final = _text(_CONTINUATION)
LOOP: Final = _text(_LOOP)
"""One round of the endless answer."""
PONDER: Final = _text(_PONDER)
"""One round of the endless thought."""
TOOL_NAME: Final = "get_weather"
CITY: Final = "Paris"
SECOND_CITY: Final = "Rome"

_BYTES: Final = tuple(bytes([value]) for value in range(256))
_END: Final = "<|im_end|>"
_CONTROL: Final = ("<|endoftext|>", "<|im_start|>", _END)
_TAGS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_MARKERS: Final = ("<|call|>", "<|calls|>", "<|result|>", "<|forever|>", "<|ponder|>")
_BLANK_LINE: Final = "\n\n"

# Weights of the table. The last norm multiplies them by more than ten, so steps of one are far
# beyond what a usual temperature can bridge.
_NEXT: Final = 20.0
_BENT: Final = 15.0  # with the marker's push above _NEXT, without it below
_PUSH: Final = 10.0
_SECOND: Final = 12.0  # where the grammar of a required call forbids to end
_NEVER: Final = -120.0
# What is liked after any token, the best first: ends and closing signs before content.
_LIKED: Final[tuple[Piece, ...]] = (
    *(_CONTINUATION[0], _END, b'"', b"a", b"}", b"]", "</tool_call>", b",", b":", b"1", b"t", b"{"),
)
_UNLIKED: Final[tuple[Piece, ...]] = (b"-", b".", "<tool_call>", b"<")


class _Table:
    """Tokens, and for each of them the weights of what may follow."""

    def __init__(self) -> None:
        import numpy as np

        words = dict.fromkeys(
            piece
            for script in (
                *(_SENTENCE, _THOUGHT, _AFTER_TOOL, _LOOP, _PONDER, _CONTINUATION),
                *(_CALL, _SECOND_CALL),
            )
            for piece in script
            if isinstance(piece, str) and piece not in _TAGS
        )
        self.pieces: tuple[Piece, ...] = (
            *_BYTES,
            _BLANK_LINE,
            *_CONTROL,
            *_TAGS,
            *_MARKERS,
            *words,
        )
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}
        self.size = len(self.pieces)
        # A whole number of blocks of 32, with room for one feature per marker.
        self.width = -(-(self.size + len(_MARKERS)) // 32) * 32
        self.weights = np.full((self.size, self.width), _NEVER, dtype=np.float32)
        self.weights[:, self.size :] = 0.0
        ranked = (*_LIKED, *_UNLIKED)
        others = [byte for byte in _BYTES if b" " < byte <= b"~" and byte not in ranked]
        for step, piece in enumerate((*_LIKED, *others, *_UNLIKED)):
            self.weights[self.ids[piece], : self.size] = 9.0 - step

    def chain(self, start: Piece, *pieces: Piece, weight: float = _NEXT) -> None:
        """Let ``pieces`` follow ``start``, one after the other."""
        for last, following in zip((start, *pieces), pieces, strict=False):
            self.weights[self.ids[following], self.ids[last]] = weight
            weight = _NEXT

    def bend(self, marker: str, start: Piece, piece: Piece) -> None:
        """Let ``piece`` follow ``start`` while ``marker`` is in the prompt."""
        self.weights[self.ids[piece], self.ids[start]] = _BENT
        self.weights[self.ids[piece], self.size + _MARKERS.index(marker)] = _PUSH

    def texts(self) -> list[str]:
        """The token texts in the alphabet that byte-level vocabularies are stored in."""
        alphabet = _byte_alphabet()
        return [
            piece
            if piece in _CONTROL or piece in _TAGS or piece in _MARKERS
            else "".join(
                alphabet[byte] for byte in (piece if isinstance(piece, bytes) else piece.encode())
            )
            for piece in self.pieces
        ]

    def types(self) -> list[int]:
        """Normal (1), control (3: matched whole, not printed), user-defined (4: printed)."""
        return [
            3 if piece in _CONTROL or piece in _MARKERS else 4 if piece in _TAGS else 1
            for piece in self.pieces
        ]


def _byte_alphabet() -> list[str]:
    """The usual mapping: printable bytes stand for themselves, the rest from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = 0x100
    alphabet = []
    for byte in range(256):
        alphabet.append(chr(byte if byte in plain else moved))
        moved += byte not in plain
    return alphabet


def _demo_table() -> _Table:
    table = _Table()
    table.chain(b"\n", "<think>", *_THOUGHT, "</think>", _BLANK_LINE, *_SENTENCE, _END)
    table.chain(*_CONTINUATION, _END)
    table.chain(*_AFTER_TOOL, _END)
    table.chain(*_CALL, _END)
    table.chain(*_SECOND_CALL, _END)
    table.chain(*_LOOP, _LOOP[0])
    table.chain(*_PONDER, _PONDER[0])
    for opened, closed in ((b"{", b"}"), (b"[", b"]")):
        table.chain(opened, closed, weight=_SECOND)
    for letter in (b"-", b"_", *(byte for byte in _BYTES if byte.isalnum())):
        table.chain(letter, _CALL[3], weight=8.5)  # ends the name of a call to another tool
    for last in (_SENTENCE[-1], _AFTER_TOOL[-1], _CONTINUATION[-1]):
        table.chain(last, "<tool_call>", weight=_SECOND)
    for marker in ("<|call|>", "<|calls|>"):
        table.bend(marker, _BLANK_LINE, "<tool_call>")
    table.bend("<|calls|>", "</tool_call>", _SECOND_CALL[0])
    table.bend("<|result|>", _BLANK_LINE, _AFTER_TOOL[0])
    table.bend("<|forever|>", _BLANK_LINE, _LOOP[0])
    table.bend("<|ponder|>", "<think>", _PONDER[0])
    return table


def _loop_table() -> _Table:
    table = _Table()
    for start in (b"\n", _BLANK_LINE):
        table.chain(start, *_LOOP, _LOOP[0])
    return table


def _think_table() -> _Table:
    table = _demo_table()
    table.chain(b"\n", "<think>", *_PONDER, _PONDER[0])
    for piece in _PONDER[:1]:  # the demo's thought is gone: what follows <think> is one piece
        table.weights[table.ids[_THOUGHT[0]], table.ids["<think>"]] = _NEVER
        table.weights[table.ids[piece], table.ids["<think>"]] = _NEXT
    return table


def _plain_table() -> _Table:
    table = _demo_table()
    table.weights[table.ids["<think>"], table.ids[b"\n"]] = _NEVER
    table.chain(b"\n", *_SENTENCE, _END)
    return table


@dataclass(frozen=True, slots=True)
class _Recipe:
    table: Any = _demo_table
    template: str = ""
    layers: int = 1
    feed_forward: int = 8
    random: bool = False
    cut: bool = False


def _recipe(variant: Variant) -> _Recipe:
    full = chat_template()
    return {
        "demo": _Recipe(template=full),
        "slow": _Recipe(template=full, layers=160),
        "heavy": _Recipe(template=full, layers=500, feed_forward=64),
        "loop": _Recipe(_loop_table, full),
        "think": _Recipe(_think_table, full),
        "tool": _Recipe(template=chat_template(call="tools", calls="false")),
        "tools": _Recipe(template=chat_template(call="false", calls="tools")),
        "plain": _Recipe(_plain_table, plain_template()),
        "embed": _Recipe(template=full, random=True),
        "broken": _Recipe(template=full, cut=True),
    }[variant]


_CONTEXT: Final = 131072
_HEAD: Final = 8
_SCORE: Final = 40.0  # of the marker in the attention: all else weighs exp(-40)


def write_model(path: Path, variant: Variant = "demo") -> Path:
    """Write the model ``variant`` to ``path`` unless it is there already, and return ``path``.

    The file appears at once and whole, readable by its owner alone. One that an earlier version
    wrote is replaced.

    :raises OSError: the directory is missing or cannot be written
    """
    recipe = _recipe(variant)
    version = _version(variant)
    if _version_of(path) == version:
        return path
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        _write(Path(name), f"{variant} {version}", recipe)
        if recipe.cut:
            os.truncate(name, os.path.getsize(name) // 2)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def write_demo_model(path: Path) -> Path:
    """:func:`write_model` for the demo model: about half a megabyte."""
    return write_model(path, "demo")


def _write(path: Path, label: str, recipe: _Recipe) -> None:
    import gguf

    table = recipe.table()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.version", label)
    writer.add_name("provider-llamacpp demo")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(table.width)
    writer.add_block_count(recipe.layers)
    writer.add_feed_forward_length(recipe.feed_forward)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_rope_freq_base(1e12)  # the last pair, which the head uses, does not turn
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    texts = table.texts()
    writer.add_token_list(texts)
    writer.add_token_types(table.types())
    newline = texts[ord("\n")]
    writer.add_token_merges([f"{newline} {newline}"])
    writer.add_eos_token_id(table.ids[_END])
    writer.add_pad_token_id(table.ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(recipe.template)
    if recipe.random:
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    for name, tensor in _tensors(table, recipe):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(table: _Table, recipe: _Recipe) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Name and values (row-major) of every tensor; norms stay F32, matrices are F16."""
    import numpy as np

    width, half = table.width, np.float16
    embedding = np.zeros((table.size, width), dtype=half)
    embedding[np.arange(table.size), np.arange(table.size)] = 1.0
    output = table.weights.astype(half)
    if recipe.random:
        embedding = np.random.default_rng(7).standard_normal((table.size, width)).astype(half)
    yield "token_embd.weight", embedding
    yield "output_norm.weight", np.ones(width, dtype=np.float32)
    yield "output.weight", output
    for layer in range(recipe.layers):
        attention = _marker_head(table) if layer == 0 and not recipe.random else _idle_head(table)
        for name, values in zip(("q", "k", "v", "output"), attention, strict=True):
            yield f"blk.{layer}.attn_{name}.weight", values.astype(half)
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", np.ones(width, dtype=np.float32)
        wide = np.zeros((recipe.feed_forward, width), dtype=half)
        yield f"blk.{layer}.ffn_gate.weight", wide
        yield f"blk.{layer}.ffn_up.weight", wide
        yield f"blk.{layer}.ffn_down.weight", np.zeros((width, recipe.feed_forward), dtype=half)


def _idle_head(table: _Table) -> list[np.ndarray[Any, Any]]:
    import numpy as np

    return [np.zeros((_HEAD, table.width), dtype=np.float32) for _ in "qkv"] + [
        np.zeros((table.width, _HEAD), dtype=np.float32)
    ]


def _marker_head(table: _Table) -> list[np.ndarray[Any, Any]]:
    """An attention head that every token uses to look for a marker, wherever it stands.

    Each token asks the same question, only markers answer it, and each marker says its own
    feature. Without one in the prompt the others are weighed alike, and say nothing.
    """
    query, key, value, out = _idle_head(table)
    scale = table.width**0.5  # a norm makes this of the one in a one-hot vector
    strength = (_SCORE * _HEAD**0.5) ** 0.5 / scale
    query[_HEAD - 2, : table.size] = strength
    for index, marker in enumerate(_MARKERS):
        token = table.ids[marker]
        key[_HEAD - 2, token] = strength
        value[index, token] = 1.0 / scale
        out[table.size + index, index] = 1.0
    return [query, key, value, out]


def _version(variant: Variant) -> str:
    """Changes whenever this code does: the cheapest rule that never keeps a stale file."""
    sources = (Path(__file__), Path(__file__).with_name("template.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _version_of(path: Path) -> str:
    """The version in the header of a file written here, else nothing."""
    try:
        with path.open("rb") as file:
            header = file.read(512)
    except FileNotFoundError:
        return ""
    _, found, rest = header.partition(b"general.version")
    return rest[12:].split(b" ", 1)[-1][:16].decode("ascii", "replace") if found else ""
