"""What the code says of itself: its modules, who imports whom, which threads are started where.

Read from the source by :mod:`ast`; nothing is imported or run. The pictures of the architecture
page and the tests of the layers both come from here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "provider_llamacpp"
APART = ("commands", "local")
"""Packages that the worker does without."""

Graph = dict[str, set[str]]
"""Who imports (or comes after) whom."""


def modules(package: Path = PACKAGE, *, apart: bool = False) -> dict[str, Path]:
    """Every module by its dotted name inside ``package``; those of :data:`APART` on demand."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if (apart or parts[0] not in APART) and parts[-1] != "__init__":
            found[".".join(parts)] = path
    return found


def imported(module: str, known: Mapping[str, Path], *, lazily: bool = False) -> Iterator[str]:
    """Own modules that ``module`` imports at its top, or with ``lazily`` anywhere."""
    tree = ast.parse(known[module].read_text(encoding="utf-8"))
    package = module.split(".")[:-1]
    yield from _named(ast.walk(tree) if lazily else tree.body, package, known)


def _named(
    nodes: Iterable[ast.AST], package: list[str], known: Mapping[str, Path]
) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                name = ".".join([*base, alias.name])
                yield name if name in known else ".".join(base)


def imported_on_use(module: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Own modules that a function of ``module`` imports when it is called."""
    tree = ast.parse(known[module].read_text(encoding="utf-8"))
    package = module.split(".")[:-1]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _named(ast.walk(function), package, known)


def imports_within(package: str) -> Graph:
    """The imports between the modules of one package, by their last names."""
    known = {name: path for name, path in modules().items() if name.startswith(f"{package}.")}
    return {
        name.rpartition(".")[2]: {
            other.rpartition(".")[2]
            for other in imported(name, modules())
            if other in known and other != name
        }
        for name in known
    }


def imports_between_packages(*, on_use: bool = False) -> Graph:
    """The imports between packages, and the modules that stand beside them.

    :param on_use: those instead that are made when a function is called
    """
    known = modules()
    look = imported_on_use if on_use else imported
    graph: Graph = {}
    for name in known:
        near = name.partition(".")[0]
        if near.startswith("_"):
            continue
        others = graph.setdefault(near, set())
        for other in look(name, known):
            far = other.partition(".")[0]
            if far and far != near and not far.startswith("_") and far not in APART:
                others.add(far)
    return graph


def reduced(graph: Graph) -> Graph:
    """``graph`` without the arrows that follow from others: of a -> b -> c and a -> c the last.

    :raises ValueError: if it has a circle
    """
    reach: Graph = {}

    def reachable(node: str, path: tuple[str, ...]) -> set[str]:
        if node in path:
            raise ValueError("a circle: " + " -> ".join([*path, node]))
        if node not in reach:
            far = {more for other in graph[node] for more in reachable(other, (*path, node))}
            reach[node] = graph[node] | far
        return reach[node]

    for node in graph:
        reachable(node, ())
    return {
        node: {
            other
            for other in others
            if not any(other in reach[between] for between in others if between != other)
        }
        for node, others in graph.items()
    }


@dataclass(frozen=True)
class ThreadStart:
    """One place in the code that starts a thread, or a pool of them.

    :ivar name: what the thread is called; ``<id>`` stands for the provider's id, N for a number
    :ivar module: where it is started
    :ivar function: that starts it, as ``Class.method``
    :ivar runs: the function it runs; empty for a pool, which runs what it is given
    """

    name: str
    module: str
    function: str
    runs: str


class Source:
    """The trees of all modules, with what it takes to say what a name in a call stands for."""

    def __init__(self, known: Mapping[str, Path]) -> None:
        self.trees = {
            name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()
        }

    def threads(self) -> list[ThreadStart]:
        """All of them, by module and line."""
        return [
            start
            for module, tree in self.trees.items()
            for scope in _functions(tree)
            for start in self._started_in(module, scope)
        ]

    def _started_in(self, module: str, scope: _Scope) -> Iterator[ThreadStart]:
        for call in scope.calls:
            given = {each.arg: each.value for each in call.keywords if each.arg}
            function = ".".join(scope.path)
            if _called(call) == "Thread":
                name = self._text(given.get("name"), scope)
                yield ThreadStart(name, module, function, _dotted(given["target"], scope))
            elif _called(call) == "ThreadPoolExecutor":
                name = self._text(given.get("thread_name_prefix"), scope)
                yield ThreadStart(f"{name}-N", module, function, "")

    def _text(self, value: ast.expr | None, scope: _Scope) -> str:
        """What a thread's name will be; ``?`` if that cannot be told."""
        if isinstance(value, ast.Constant):
            return str(value.value)
        if isinstance(value, ast.JoinedStr):
            return "".join(
                f"<{_last(each.value)}>"
                if isinstance(each, ast.FormattedValue)
                else self._text(each, scope)
                for each in value.values
            )
        if isinstance(value, ast.Attribute) and scope.owner is not None:
            for maker in _functions(scope.owner, (scope.owner.name,)):
                if maker.path[-1] == "__init__" and value.attr in maker.kept:
                    return self._given(scope.owner.name, maker.kept[value.attr], maker)
        if isinstance(value, ast.Name):
            made = scope.owner if scope.path[-1] == "__init__" else None
            return self._given(made.name if made else scope.path[-1], value.id, scope)
        return "?"

    def _given(self, function: str, parameter: str, of: _Scope) -> str:
        """What callers of ``function`` pass as ``parameter``, wherever that is told first."""
        arguments = [each.arg for each in of.node.args.args if each.arg != "self"]
        for tree in self.trees.values():
            for scope in _functions(tree):
                for call in scope.calls:
                    if _called(call) != function:
                        continue
                    given = dict(zip(arguments, call.args, strict=False))
                    given |= {each.arg: each.value for each in call.keywords if each.arg}
                    if isinstance(given.get(parameter), ast.JoinedStr):
                        return self._text(given[parameter], scope)
        return "?"


@dataclass(frozen=True)
class _Scope:
    node: ast.FunctionDef
    owner: ast.ClassDef | None
    path: tuple[str, ...]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """The calls in it, those in functions inside it not counted."""
        found: list[ast.Call] = []
        todo: list[ast.AST] = list(self.node.body)
        while todo:
            node = todo.pop(0)
            if isinstance(node, ast.Call):
                found.append(node)
            if not isinstance(node, ast.FunctionDef):
                todo[:0] = ast.iter_child_nodes(node)
        return found

    @cached_property
    def kept(self) -> dict[str, str]:
        """Attribute -> parameter, where a method keeps one as ``self.attribute = parameter``."""
        return {
            node.targets[0].attr: node.value.id
            for node in ast.walk(self.node)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.value, ast.Name)
        }


def _functions(
    tree: ast.AST, path: tuple[str, ...] = (), owner: ast.ClassDef | None = None
) -> Iterator[_Scope]:
    if isinstance(tree, ast.ClassDef):
        owner = tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, (*path, node.name), node)
        elif isinstance(node, ast.FunctionDef):
            yield _Scope(node, owner, (*path, node.name))
            yield from _functions(node, (*path, node.name), owner)


def _called(call: ast.Call) -> str:
    return _last(call.func)


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "?"


def _dotted(node: ast.expr, scope: _Scope) -> str:
    """A thread's target, ``self`` by the name of its class."""
    text = ast.unparse(node)
    return text.replace("self.", f"{scope.owner.name}.", 1) if scope.owner is not None else text
