"""The Sphinx directives of these pages: pictures of the code, and the written reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import codemap
import drawing
import reference
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

import provider_llamacpp


class Picture(Directive):
    """``.. picture-of:: imports``, ``imports PACKAGE`` or ``threads``."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The picture, for pages in HTML."""
        if self.arguments == ["imports"]:
            svg = imports_picture()
        elif self.arguments == ["threads"]:
            svg = threads_picture()
        else:
            svg = package_picture(self.arguments[1])
        caption = "".join(f"<figcaption>{name}</figcaption>" for name in self.arguments[1:])
        return [nodes.raw("", f'<figure class="picture">{caption}{svg}</figure>', format="html")]


def imports_picture() -> str:
    """Who imports whom, package by package."""
    always = codemap.imports_between_packages()
    later = codemap.imports_between_packages(on_use=True)
    graph = {name: others | later[name] for name, others in always.items()}
    rare = {name: others - always[name] for name, others in later.items()}
    return drawing.layered(codemap.reduced(graph), "Imports between packages", rare)


def package_picture(package: str) -> str:
    """Who imports whom inside one package."""
    graph = codemap.reduced(codemap.imports_within(package))
    return drawing.layered(graph, f"Imports inside {package}")


def threads_picture() -> str:
    """Which function starts which thread."""
    rows = [
        ([start.module, start.function], [start.name, start.runs or "what it is given"])
        for start in codemap.Source(codemap.modules()).threads()
    ]
    return drawing.pairs(rows, "Threads, and what starts them")


class Written(SphinxDirective):
    """``.. written-of:: NAME``: one part of the reference."""

    required_arguments = 1
    parts: ClassVar[dict[str, Callable[[], str]]] = {
        "functions": reference.bus_functions,
        "command-line": reference.command_line,
        "settings": reference.settings_fields,
        "public-names": reference.public_names,
    }

    def run(self) -> list[nodes.Node]:
        """Its nodes, sections among them."""
        text = self.parts[self.arguments[0]]()
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def public_place(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.TextElement
) -> nodes.Element | None:
    """The page of a public name that a docstring gives by the module it is written in."""
    parts = str(node.get("reftarget", "")).split(".")
    for at, part in enumerate(parts):
        if at > 0 and parts[0] == "provider_llamacpp" and part in provider_llamacpp.__all__:
            target = ".".join([parts[0], *parts[at:]])
            return env.domains.python_domain.resolve_xref(
                env, node["refdoc"], app.builder, node["reftype"], target, node, shown
            )
    return None


def without_contents(app: Sphinx, doctree: nodes.document) -> None:
    """Lists of contents are for who reads a page as text: the site has one beside each page."""
    for topic in list(doctree.findall(nodes.topic)):
        if "contents" in topic["classes"]:
            topic.parent.remove(topic)
            # Headings lead back to a list that has them.
            for title in doctree.findall(nodes.title):
                title.attributes.pop("refid", None)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("picture-of", Picture)
    app.add_directive("written-of", Written)
    app.connect("missing-reference", public_place)
    app.connect("doctree-read", without_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
