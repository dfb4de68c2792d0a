"""The table of the added bus functions in ``docs/llama-server.rst``, made of their schemas.

``python tests/functions_table.py`` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from provider_llamacpp.schemas import function_schemas
from provider_llamacpp.surfaces.table import SURFACES, surface_schemas

PAGE = Path(__file__).parent.parent / "docs" / "llama-server.rst"
BEGIN = ".. The table of functions: written by tests/functions_table.py, checked by a test.\n"
END = ".. End of the table of functions.\n"

Schema = dict[str, Any]


def table() -> str:
    """The table as reStructuredText."""
    schemas = {"status": function_schemas("<id>")["status"], **surface_schemas("<id>")}
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 30 35 35", ""]
    lines += _row(["function", "input", "output"])
    for name in ["status", *(surface.name for surface in SURFACES)]:
        entry = schemas[name]
        about = re.sub("`([^`]+)`", r"``\1``", entry["description"])
        sides = (_side(entry["request_format"]), _side(entry["response_format"]))
        lines += _row([f"``{name}``: {about}", *sides])
    return "\n".join([*lines, ""])


def _row(cells: list[str]) -> list[str]:
    first, *others = (cell.split("\n") for cell in cells)
    lines = [f"   * - {first[0]}"]
    for cell in others:
        lines.append(f"     - {cell[0]}")
        lines += [f"       {line}" for line in cell[1:]]
    return lines


def _side(schema: Schema) -> str:
    fields = [f"| {field}" for field in _fields(schema, schema.get("definitions", {}))]
    return "\n".join(fields) or "nothing"


def _fields(schema: Schema, definitions: Schema) -> list[str]:
    found = []
    for name, each in schema.get("properties", {}).items():
        kind = _type(each, definitions)
        if name in schema.get("required", ()):
            found.append(f"``{name}`` {kind}")
        else:
            found.append(f"``{name}?`` {kind.removesuffix(' or null')}")
    return found


def _type(schema: Schema | bool, definitions: Schema) -> str:
    if not isinstance(schema, dict):
        return "anything"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "channel" if name == "StreamChannelRef" else _type(definitions[name], definitions)
    if "anyOf" in schema:
        return " or ".join(_type(each, definitions) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"``{each}``" for each in schema["enum"] if each is not None)
    kinds = schema.get("type", "anything")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_of_kind(kind, schema, definitions) for kind in kinds)


def _of_kind(kind: str, schema: Schema, definitions: Schema) -> str:
    if kind == "array":
        return f"list of {_type(schema['items'], definitions)}"
    if kind == "object":
        if schema.get("properties"):
            return f"({', '.join(_fields(schema, definitions))})"
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            return f"object of {_type(values, definitions)}"
    return kind


def page_with(new: str, page: str) -> str:
    """``page`` with its table replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    assert begin and end, f"{PAGE.name} has lost the marks around the table"
    return f"{before}{begin}\n{new}\n{end}{behind}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
