"""The reference pages, written from what the program itself holds: as reStructuredText.

Bus functions come from the registered schemas, the command line from its parser, settings from the
fields of their dataclass. What these do not say is not on the pages, and nothing else is.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Any

import codemap

import provider_llamacpp
from provider_llamacpp import ProviderSettings, cli, settings
from provider_llamacpp.schemas import function_schemas
from provider_llamacpp.settings import Settings
from provider_llamacpp.surfaces.table import SURFACES, Surface, surface_schemas

Schema = dict[str, Any]
_ID = "<id>"


def _plain(text: str) -> str:
    """``text`` with nothing in it that reStructuredText would read as markup."""
    return re.sub(r"([\\*`|_<])", r"\\\1", text)


def _coded(text: str) -> str:
    """Text of a schema, which marks code as Markdown does."""
    return re.sub("`+([^`]+)`+", r"``\1``", text)


def _heading(text: str, sign: str) -> list[str]:
    return [text, sign * len(text), ""]


def _indented(lines: Iterable[str], by: int = 3) -> list[str]:
    return [" " * by + line if line else "" for line in lines]


# -- bus functions ----------------------------------------------------------------------------


def bus_functions() -> str:
    """Every function: what it does, when it is there, its input and output."""
    schemas = function_schemas(_ID) | surface_schemas(_ID)
    conditions = {surface.name: _condition(surface) for surface in SURFACES}
    lines: list[str] = []
    for name, entry in schemas.items():
        lines += [f".. _function-{name}:", "", *_heading(f"``{name}``", "-")]
        lines += [f"``provider::{_ID}::{name}``. {_coded(entry['description'])}", ""]
        if conditions.get(name):
            lines += [f"There with {conditions[name]} only.", ""]
        for side, title in (("request_format", "Input"), ("response_format", "Output")):
            lines += [f"**{title}**", "", *_body(entry[side]), ""]
    return "\n".join([*lines, *_types(schemas)])


def _condition(surface: Surface) -> str:
    """The flag it needs, if any."""
    given: dict[str, Any] = {"allow_server_tools": ("read",), "allow_model_management": True}
    if surface.allowed(Settings()):
        return ""
    flags = [name for name, value in given.items() if surface.allowed(Settings(**{name: value}))]
    return " and ".join(f":option:`provider-llamacpp {_flag(name)}`" for name in flags)


def _body(schema: Schema) -> list[str]:
    about = schema.get("description")
    lines = [_coded(about), ""] if about else []
    return [*lines, *(_fields(schema) or ["No fields."])]


def _fields(schema: Schema) -> list[str]:
    """The fields of an object, as a list of definitions."""
    lines = []
    for name, each in schema.get("properties", {}).items():
        needed = "" if name in schema.get("required", ()) else ", optional"
        lines.append(f"``{name}`` : {_type(each)}{needed}")
        lines += _indented(_about(each) or ["\\"])
        lines.append("")
    return lines


def _about(schema: Schema | bool) -> list[str]:
    """What is known of a value beside its type: words, limits, fields of its own."""
    if not isinstance(schema, dict):
        return []
    lines = [_coded(schema["description"])] if "description" in schema else []
    default = schema.get("default")
    if default is not None:
        lines.append(f"Default: ``{default}``.")
    inner = schema.get("items") if isinstance(schema.get("items"), dict) else schema
    assert isinstance(inner, dict)
    if inner is not schema and "description" in inner:
        lines.append(_coded(inner["description"]))
    if inner.get("properties"):
        lines += ["", *_fields(inner)]
    return lines


def _type(schema: Schema | bool) -> str:
    if not isinstance(schema, dict):
        return "anything"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f":ref:`{name} <type-{name.lower()}>`"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if "enum" in schema:
        return " or ".join("null" if each is None else f"``{each}``" for each in schema["enum"])
    kinds = schema.get("type", "anything")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_of_kind(kind, schema) for kind in kinds)


def _of_kind(kind: str, schema: Schema) -> str:
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    values = schema.get("additionalProperties")
    if kind == "object" and isinstance(values, dict):
        return f"object of {_type(values)}"
    return kind


def _types(schemas: Mapping[str, Schema]) -> Iterator[str]:
    """The types that several functions share."""
    found: dict[str, Schema] = {}
    for entry in schemas.values():
        for side in ("request_format", "response_format"):
            found |= entry[side].get("definitions", {})
    yield from _heading("Types", "-")
    for name in sorted(found):
        schema = found[name]
        yield from [f".. _type-{name.lower()}:", "", *_heading(name, "~")]
        if "description" in schema:
            yield from [_coded(schema["description"]), ""]
        alternatives = schema.get("oneOf") or schema.get("anyOf")
        if schema.get("properties"):
            yield from _fields(schema)
        elif alternatives and all("properties" in each for each in alternatives):
            yield from ["One of:", ""]
            for each in alternatives:
                yield from _item(
                    [*filter(None, [_coded(each.get("description", ""))]), "", *_fields(each)]
                )
        else:
            yield from [_type(schema), ""]


def _item(lines: list[str]) -> list[str]:
    while lines and not lines[0]:
        lines = lines[1:]
    first, *rest = lines
    return [f"- {first}", *_indented(rest, 2), ""]


# -- the command line -------------------------------------------------------------------------


def command_line() -> str:
    """Each command with its arguments, as ``--help`` shows them."""
    # The width of whoever builds the pages must not show in them.
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        return "\n".join(_commands())
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns


def _commands() -> Iterator[str]:
    top = cli.parser(tuple(cli.COMMANDS))
    yield from _command(top, "The worker")
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from _command(command, f"``{name}``")


def _command(command: argparse.ArgumentParser, title: str) -> Iterator[str]:
    yield from _heading(title, "-")
    yield f".. program:: {command.prog}"
    yield ""
    for part in re.split(r"\n{2,}", command.description or ""):
        yield from [_plain(part), ""]
    yield from [".. code-block:: text", "", *_indented(command.format_usage().splitlines()), ""]
    for action in command._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        yield from _argument(command, action)
    for part in re.split(r"\n{2,}", (command.epilog or "").strip()):
        if part.startswith("examples:"):
            example = textwrap.dedent(part.partition("\n")[2])
            yield from [".. code-block:: console", "", *_indented(_prompted(example)), ""]
        elif part:
            yield from [_plain(part), ""]


def _prompted(example: str) -> list[str]:
    """Command lines with a prompt before each, but for those that go on."""
    lines = example.splitlines()
    return [
        f"  {line}"
        if number and (line.startswith(" ") or lines[number - 1].endswith("|"))
        else f"$ {line}"
        for number, line in enumerate(lines)
    ]


def _argument(command: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    words = _plain((action.help or "") % {"prog": command.prog, **vars(action)})
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    if not action.option_strings:
        return [f".. option:: {value}", "", *_indented([words]), ""]
    takes = "" if action.nargs == 0 else f" [{value}]" if action.nargs == "?" else f" {value}"
    forms = ", ".join(f"{flag}{takes}" for flag in action.option_strings)
    return [f".. option:: {forms}", "", *_indented([words]), ""]


# -- settings ---------------------------------------------------------------------------------


def settings_fields() -> str:
    """Each field of the settings with its default, its flag and its variables."""
    foreign = _foreign_variables()
    lines = [".. autoclass:: provider_llamacpp.Settings", "   :no-members:", ""]
    for each in fields(Settings):
        lines += _indented(_setting(Settings, each, _ways(each.name, foreign)))
    lines += [".. autoclass:: provider_llamacpp.ProviderSettings", "   :no-members:", ""]
    for each in fields(ProviderSettings):
        lines += _indented(_setting(ProviderSettings, each, []))
    return "\n".join(lines)


def _setting(owner: type, each: Field[Any], ways: list[str]) -> list[str]:
    lines = [f".. py:attribute:: {each.name}", f"   :type: {each.type}"]
    if each.default is not MISSING:
        lines.append(f"   :value: {each.default!r}")
    words = field_words(owner).get(each.name, "")
    lines += ["", *_indented(words.splitlines()), ""]
    return [*lines, *_indented([f"| {way}" for way in ways]), ""]


def field_words(owner: type) -> dict[str, str]:
    """What is written below each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    return _words_below(tree.body)


def _words_below(statements: list[ast.stmt]) -> dict[str, str]:
    """What is written below each annotated assignment."""
    found = {}
    for field, below in pairwise(statements):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _ways(name: str, foreign: Mapping[str, list[str]]) -> list[str]:
    """How it is set from outside: flag and environment, if at all."""
    ways = []
    if name in cli.SETTING_FLAGS:
        ways.append(f"Flag: :option:`provider-llamacpp {_flag(name)}`")
    own = settings.ENV_PREFIX + name.upper()
    known = [] if settings.unknown_variables({own: "1"}) else [own]
    variables = [*known, *foreign.get(name, [])]
    if variables:
        ways.append("Environment: " + ", ".join(f"``{variable}``" for variable in variables))
    return ways


def _foreign_variables() -> dict[str, list[str]]:
    """The engine's own variables: which setting changes when one is set."""
    found: dict[str, list[str]] = {}
    plain = settings.from_environment({})
    for variable in sorted(set(re.findall(r'"(III_\w+)"', inspect.getsource(settings)))):
        changed = settings.from_environment({variable: "ws://example:1"})
        for each in fields(Settings):
            if getattr(changed, each.name) != getattr(plain, each.name):
                found.setdefault(each.name, []).append(variable)
    return found


# -- the public names -------------------------------------------------------------------------


def public_names() -> str:
    """All of ``provider_llamacpp.__all__`` but the settings, which have a page of their own."""
    kinds: dict[str, list[str]] = {"Classes": [], "Functions": [], "Errors": [], "Values": []}
    for name in provider_llamacpp.__all__:
        value = getattr(provider_llamacpp, name)
        if name in ("Settings", "ProviderSettings"):
            continue
        full = f"provider_llamacpp.{name}"
        if inspect.isclass(value) and issubclass(value, BaseException):
            entry = [f".. autoexception:: {full}", "   :members:", "   :show-inheritance:"]
            kinds["Errors"] += [*entry, ""]
        elif inspect.isclass(value):
            kinds["Classes"] += [f".. autoclass:: {full}", "   :members:", ""]
        elif inspect.isroutine(value):
            kinds["Functions"] += [f".. autofunction:: {full}", ""]
        else:
            kinds["Values"] += [f".. py:data:: {full}", "", *_indented(_value_words(name)), ""]
    lines = []
    for title, entries in kinds.items():
        if entries:
            lines += [*_heading(title, "-"), *entries]
    return "\n".join(lines)


def _value_words(name: str) -> list[str]:
    """What is written about a value; of a type that stands for others, these too."""
    value = getattr(provider_llamacpp, name)
    if isinstance(value, str):
        return [f"At present ``{value}``."]
    homes = provider_llamacpp._HOMES.items()
    (home,) = [module for module, names in homes if name in names]
    source = codemap.modules()[home].read_text(encoding="utf-8")
    statements = ast.parse(source).body
    lines = []
    for each in statements:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name and each.value:
            lines += ["Stands for " + _linked(ast.unparse(each.value)) + ".", ""]
    return [*lines, *_words_below(statements).get(name, "").splitlines()]


def _linked(type_text: str) -> str:
    """A type as text, with links to those that are public."""
    public = set(provider_llamacpp.__all__)
    parts = type_text.split(" | ")
    return " or ".join(
        f":class:`~provider_llamacpp.{part}`" if part in public else f"``{part}``" for part in parts
    )
