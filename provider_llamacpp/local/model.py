"""Writes the tiny GGUF models that the embedded stack and the tests run on.

They are real files for the real llama.cpp, but no language models: the last token decides what
follows (see :mod:`.tokentable`). So the answers are exact and repeatable, while sampler, grammar,
chat template and parsers of the server do their usual work.

What the demo model does, at any usual temperature:

* recites :data:`SENTENCE`; with ``enable_thinking`` it first thinks :data:`THOUGHT`;
* with tools, and "weather" in the last user text, calls a tool (:data:`TOOL_NAME` if it is among
  them) for :data:`CITY`; with "both" in it too, again for :data:`SECOND_CITY`;
* after a tool result says :data:`AFTER_TOOL`;
* with "forever" in the last user text repeats :data:`LOOP` without end, with "ponder" and
  thinking on thinks :data:`PONDER` without end;
* continues any other text (a raw prompt, an assistant message to go on with) with
  :data:`CONTINUATION`;
* where a call is required but not asked for, says its sentence before the call;
* under a JSON grammar closes everything as soon as it may: ``{"name":"","age":1}``;
* as an embedding model (mean pooling) tells texts apart by the letters they hold.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from .template import chat_template, plain_template
from .tokentable import ANYTIME, BYTES, HEAD, SECOND, Piece, TokenTable

if TYPE_CHECKING:
    import numpy as np

Variant = Literal[
    "demo",
    "slow",
    "heavy",
    "loop",
    "think",
    "tool",
    "tools",
    "plain",
    "embed",
    "infill",
    "broken",
]
"""``slow``: the demo at some hundred tokens a second. ``heavy``: takes seconds to load, the file
has 80 MB. ``loop``, ``think``: an answer, a thought that never ends. ``tool``, ``tools``: one call,
two calls whenever tools are given. ``plain``: a template that knows neither tools nor thinking.
``embed``: random weights and mean pooling. ``infill``: has tokens for filling in the middle, and
fills in :data:`CONTINUATION`. ``broken``: the demo cut in the middle."""
VARIANTS: Final[tuple[Variant, ...]] = get_args(Variant)

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
_CITY: Final = ("Pa", "ris")
_SECOND_CITY: Final = ("Ro", "me")
_ARGUMENTS: Final = '", "arguments": {"city": "'
_CLOSE: Final = '"}}\n'
# Said by the model, and a marker too: from here on it is the second call that is being written.
_AGAIN: Final = '\n<tool_call>\n{"name": "'

TOOL_NAME: Final = "get_weather"


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
CITY: Final = _text(_CITY)
SECOND_CITY: Final = _text(_SECOND_CITY)

_END: Final = "<|im_end|>"
_NEWLINE: Final = b"\n"  # what a prompt ends with
_BLANK_LINE: Final = "\n\n"  # what a thought, and a prompt without thinking, end with
_MARKERS: Final = ("<|call|>", "<|calls|>", "<|result|>", "<|forever|>", "<|ponder|>")


def _new_table(*more: str) -> TokenTable:
    scripts = (_SENTENCE, _THOUGHT, _AFTER_TOOL, _LOOP, _PONDER, _CONTINUATION, _CITY, _SECOND_CITY)
    spoken = [piece for script in scripts for piece in script if isinstance(piece, str)]
    return TokenTable(
        control=("<|endoftext|>", "<|im_start|>", _END, *_MARKERS, *more),
        tags=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        words=(_BLANK_LINE, *spoken, '\n{"name": "', TOOL_NAME, _ARGUMENTS, _CLOSE, _AGAIN),
        markers={**dict.fromkeys(_MARKERS, 1), _AGAIN: 2},
        # Ends and closing signs before content, so that constrained answers stay short.
        liked=(_CONTINUATION[0], _END, *_bytes('"a}]'), "</tool_call>", *_bytes(",:1t{")),
        unliked=(*_bytes("-."), "<tool_call>", b"<"),
    )


def _bytes(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def _demo_table() -> TokenTable:
    table = _new_table()
    table.chain(_NEWLINE, "<think>", *_THOUGHT, "</think>", _BLANK_LINE, *_SENTENCE, _END)
    for ending in (_CONTINUATION, _AFTER_TOOL):
        table.chain(*ending, _END)
    for endless in (_LOOP, _PONDER):
        table.chain(*endless, endless[0])
    table.bend("<|result|>", _BLANK_LINE, _AFTER_TOOL[0])
    table.bend("<|forever|>", _BLANK_LINE, _LOOP[0])
    table.bend("<|ponder|>", "<think>", _PONDER[0])
    for opened, closed in ("{}", "[]"):
        table.chain(opened.encode(), closed.encode(), weight=ANYTIME)
    _add_calls(table)
    return table


def _add_calls(table: TokenTable) -> None:
    table.chain("<tool_call>", '\n{"name": "', TOOL_NAME, _ARGUMENTS, *_CITY, _CLOSE)
    table.chain(_CLOSE, "</tool_call>", _END)
    for marker in ("<|call|>", "<|calls|>"):
        table.bend(marker, _BLANK_LINE, "<tool_call>")
    table.bend("<|calls|>", "</tool_call>", _AGAIN)
    table.chain(_AGAIN, TOOL_NAME)
    table.bend(_AGAIN, _ARGUMENTS, _SECOND_CITY[0])
    table.chain(*_SECOND_CITY, _CLOSE)
    # The grammar spells the name of another tool letter by letter; any of them may be the last.
    for letter in (b"-", b"_", *(byte for byte in BYTES if byte.isalnum())):
        table.chain(letter, _ARGUMENTS, weight=ANYTIME)
    for ending in (_SENTENCE, _AFTER_TOOL, _CONTINUATION):
        table.chain(ending[-1], "<tool_call>", weight=SECOND)


def _loop_table() -> TokenTable:
    table = _new_table()
    for start in (_NEWLINE, _BLANK_LINE):
        table.chain(start, *_LOOP, _LOOP[0])
    return table


def _think_table() -> TokenTable:
    table = _demo_table()
    table.unchain("<think>", _THOUGHT[0])
    table.chain("<think>", *_PONDER, _PONDER[0])
    return table


def _infill_table() -> TokenTable:
    # The server knows these three by their text.
    table = _new_table("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    table.chain("<|fim_middle|>", *_CONTINUATION, _END)
    return table


def _plain_table() -> TokenTable:
    table = _demo_table()
    table.unchain(_NEWLINE, "<think>")
    table.chain(_NEWLINE, *_SENTENCE, _END)
    return table


@dataclass(frozen=True, slots=True)
class _Recipe:
    table: Callable[[], TokenTable] = _demo_table
    template: str = ""
    layers: int = 1
    feed_forward: int = 8
    random: bool = False
    cut: bool = False


def _recipe(variant: Variant) -> _Recipe:
    full = chat_template()
    recipes: dict[Variant, _Recipe] = {
        "demo": _Recipe(template=full),
        "slow": _Recipe(template=full, layers=64),
        "heavy": _Recipe(template=full, layers=500, feed_forward=64),
        "loop": _Recipe(_loop_table, full),
        "think": _Recipe(_think_table, full),
        "tool": _Recipe(template=chat_template(call="tools", calls="false")),
        "tools": _Recipe(template=chat_template(call="false", calls="tools")),
        "plain": _Recipe(_plain_table, plain_template()),
        "embed": _Recipe(template=full, random=True),
        "infill": _Recipe(_infill_table, full),
        "broken": _Recipe(template=full, cut=True),
    }
    return recipes[variant]


def write_model(path: Path, variant: Variant = "demo") -> Path:
    """Write the model ``variant`` to ``path`` unless it is there already, and return ``path``.

    The file appears at once and whole, readable by its owner alone. Another variant there, or one
    that an earlier version of this package wrote, is replaced.

    :raises OSError: the directory is missing or cannot be written
    """
    label = f"{variant} {_version()}"
    if _label_of(path) == label:
        return path
    recipe = _recipe(variant)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        _write(Path(name), label, recipe)
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
    writer.add_string(_LABEL_KEY, label)  # the first one, where _label_of looks
    writer.add_name("provider-llamacpp demo")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(131072)
    writer.add_embedding_length(table.width)
    writer.add_block_count(recipe.layers)
    writer.add_feed_forward_length(recipe.feed_forward)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(1e12)  # so that distance does not turn the pair that asks
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    texts = table.texts()
    writer.add_token_list(texts)
    writer.add_token_types(table.types())
    newline = texts[table.ids[_NEWLINE]]
    writer.add_token_merges([f"{newline} {newline}"])
    writer.add_eos_token_id(table.ids[_END])
    writer.add_pad_token_id(table.ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(recipe.template)
    if recipe.random:
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    for name, tensor in _tensors(table, recipe):
        writer.add_tensor(name, tensor)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _tensors(table: TokenTable, recipe: _Recipe) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Name and values (row-major) of every tensor; norms are F32, matrices F16."""
    import numpy as np

    ones = np.ones(table.width, dtype=np.float32)
    shape = (table.size, table.width)
    noise = np.random.default_rng(7).standard_normal(shape, dtype=np.float32).astype(np.float16)
    yield "token_embd.weight", noise if recipe.random else table.embedding()
    yield "output_norm.weight", ones
    yield "output.weight", table.output()
    for layer in range(recipe.layers):
        for name, values in table.attention():
            # One head is enough: the others only cost time.
            yield f"blk.{layer}.attn_{name}.weight", values if layer == 0 else values * 0
        wide = np.zeros((recipe.feed_forward, table.width), dtype=np.float16)
        yield f"blk.{layer}.ffn_gate.weight", wide
        yield f"blk.{layer}.ffn_up.weight", wide
        yield f"blk.{layer}.ffn_down.weight", wide.T.copy()
        yield f"blk.{layer}.attn_norm.weight", ones
        yield f"blk.{layer}.ffn_norm.weight", ones


_LABEL_KEY: Final = "general.version"


def _version() -> str:
    """Changes whenever this code does: the cheapest rule that never keeps a stale file."""
    sources = (
        Path(__file__).with_name(f"{name}.py") for name in ("model", "template", "tokentable")
    )
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _label_of(path: Path) -> str | None:
    """The label near the start of a file written here; None for anything else."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except FileNotFoundError:
        return None
    # After the key come a type (4 bytes) and the length of the text (8 bytes).
    _, _, rest = start.partition(_LABEL_KEY.encode())
    length = int.from_bytes(rest[4:12], "little")
    return rest[12 : 12 + length].decode("utf-8", "replace")
