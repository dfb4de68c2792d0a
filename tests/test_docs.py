"""The pages: what is written on them is so, what is drawn can be read, and they build."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import codemap
import drawing
import links
import pytest
import reference

import provider_llamacpp
from provider_llamacpp import cli
from provider_llamacpp.schemas import function_schemas
from provider_llamacpp.surfaces.table import SURFACES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.rst"), *ROOT.glob("*.rst")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SVG = "{http://www.w3.org/2000/svg}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# -- pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>>" in text_of(page)], ids=lambda page: page.name
)
def test_examples_on_pages_do_as_they_say(page: Path) -> None:
    done = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert done.attempted > 0
    assert done.failed == 0


def command_lines(page: Path) -> list[str]:
    """The calls of the program in a page's blocks, a line that goes on joined to the next."""
    text = text_of(page).replace("\\\n", " ")
    lines = re.findall(r"^ +(?:\$ )?(provider-llamacpp(?: .*)?)$", text, re.MULTILINE)
    # Before a pipe, a comment, the shell's own signs.
    return [re.split(r" [|<>#&]|  ", line)[0] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_on_pages_are_there(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in command_lines(page):
        words = shlex.split(line)[1:]
        try:
            cli.parser(words).parse_args(words)
        except SystemExit as ended:
            assert ended.code == 0, f"{line}: {capsys.readouterr().err}"


def test_commands_are_found() -> None:
    assert 'provider-llamacpp chat "What is a slot?"' in command_lines(DOCS / "tutorial.rst")
    service = command_lines(DOCS / "how-to" / "service.rst")
    assert all("tee" not in line for line in service) and len(service) == 2


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGES.rst"], ids=str)
def test_files_that_pages_name_are_there(page: Path) -> None:
    for name in re.findall(
        r"``((?:docs|tests|bench|examples|packaging|provider_llamacpp)/[\w./-]+)``", text_of(page)
    ):
        # The function that the page on contributing adds is not there, of course.
        made = "preview" in name and page.name == "CONTRIBUTING.rst"
        assert (ROOT / name).exists() or list(ROOT.glob(f"{name}.*")) or made, name


def test_make_targets_that_pages_name_are_there() -> None:
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        for target in re.findall(r"``make ([a-z]+)``|^ +(?:\$ )?make ([a-z]+)", text_of(page)):
            assert "".join(target) in rules, f"{page.name}: make {target}"


def build(builder: str, to: Path) -> None:
    options = ["-b", builder, "--quiet", "--fail-on-warning", "--keep-going", "--nitpicky"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(to)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    not (importlib.util.find_spec("sphinx") and importlib.util.find_spec("furo")),
    reason="the extra docs is not installed",
)
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build("html", tmp_path)
    assert links.broken(tmp_path) == []
    page = text_of(tmp_path / "architecture.html")
    assert page.count('<figure class="picture">') == 7
    for name in provider_llamacpp.__all__:
        places = [text_of(tmp_path / "reference" / f"{each}.html") for each in ("api", "settings")]
        assert any(f'id="provider_llamacpp.{name}"' in place for place in places), name


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a id="x" href="b.html#y">b</a><a href="#x">x</a>')
    (tmp_path / "b.html").write_text('<a href="c.html">c</a><a href="https://c.org/d">d</a>')
    assert links.broken(tmp_path) == [
        "a.html: b.html#y: no such place on the page",
        "b.html: c.html: no such page",
    ]
    assert links.main(str(tmp_path)) == 1


# -- the reference ------------------------------------------------------------------------------


def test_the_reference_has_every_function_and_field() -> None:
    text = reference.bus_functions()
    for name in [*function_schemas("<id>"), *(surface.name for surface in SURFACES)]:
        assert f".. _function-{name}:" in text
    assert "``messages`` : list of :ref:`AgentMessage <type-agentmessage>`" in text
    assert "``top_n`` : integer or null, optional" in text
    assert "There with :option:`provider-llamacpp --allow-server-tools` only." in text
    targets = set(re.findall(r"^\.\. _(type-\w+):", text, re.MULTILINE))
    assert set(re.findall(r"<(type-\w+)>", text)) <= targets


def test_the_reference_has_every_command_and_flag() -> None:
    text = reference.command_line()
    for name in cli.COMMANDS:
        assert f".. program:: provider-llamacpp {name}\n" in text
    for name in cli.SETTING_FLAGS:
        assert f".. option:: --{name.replace('_', '-')}" in text
    assert ".. option:: --max-streams N\n\n   streams at once (default 64)" in text
    assert '   $ provider-llamacpp chat "What is a slot?"' in text
    assert "SUPPRESS" not in text


def test_the_reference_has_every_setting_with_its_words() -> None:
    text = reference.settings_fields()
    for owner in (provider_llamacpp.Settings, provider_llamacpp.ProviderSettings):
        for name in owner.__dataclass_fields__:
            assert f".. py:attribute:: {name}\n" in text
    words = reference.field_words(provider_llamacpp.Settings)
    assert words["max_streams"].startswith("Streams at once")
    assert "``PROVIDER_LLAMACPP_URL``, ``III_URL``, ``III_WS_URL``" in text
    assert "PROVIDER_LLAMACPP_ALSO" not in text
    assert ":option:`provider-llamacpp --drain`" in text


# -- pictures -----------------------------------------------------------------------------------


def boxes_of(picture: str) -> dict[str, tuple[float, float, float, float]]:
    """Left, top, right and bottom of each box, by the text that follows it."""
    found = {}
    box = None
    for node in ET.fromstring(picture):
        if node.tag == f"{SVG}rect" and node.get("class"):
            x, y, width, height = (
                float(node.get(key, "")) for key in ("x", "y", "width", "height")
            )
            box = x, y, x + width, y + height
        elif node.tag == f"{SVG}text" and box is not None:
            found[node.text or ""] = box
    return found


GRAPHS = {
    "one": {"a": set()},
    "chain": {"a": set(), "b": {"a"}, "c": {"b"}},
    "long arrows": {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"c", "a"}, "e": {"d", "a"}},
    "more than a row": {
        **{f"module{n}": set() for n in range(12)},
        "all": {f"module{n}" for n in range(12)},
    },
    **{name: codemap.imports_within(name) for name in ("transcript", "events", "server", "bus")},
    "packages": codemap.imports_between_packages(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_boxes_lie_apart_and_arrows_go_up(name: str) -> None:
    graph = codemap.reduced(GRAPHS[name])
    picture = drawing.layered(graph, "A picture & its title")
    boxes = boxes_of(picture)
    assert boxes.keys() == graph.keys()
    for left, top, right, bottom in boxes.values():
        assert 0 <= left < right <= drawing.WIDTH
        assert 0 <= top < bottom
    for (_, one), (_, other) in combinations(boxes.items(), 2):
        assert one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    for user, used in graph.items():
        for each in used:
            assert boxes[each][3] < boxes[user][1], f"{user} -> {each}"
    assert picture.count('class="arrow"') == sum(map(len, graph.values()))
    assert "A picture &amp; its title" in picture


def test_a_box_is_as_wide_as_its_text() -> None:
    boxes = boxes_of(drawing.layered({"a_rather_long_name": set(), "b": set()}, ""))
    assert boxes["a_rather_long_name"][2] - boxes["a_rather_long_name"][0] > 18 * 6


def test_a_graph_too_wide_for_the_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        drawing.layered({"x" * 100: set()}, "")


def test_pairs() -> None:
    picture = drawing.pairs([(["worker", "start"], ["<id>-call-N"])], "Threads")
    boxes = boxes_of(picture)
    assert boxes["worker"] == boxes["start"]
    assert boxes["<id>-call-N"][2] <= drawing.WIDTH
    assert picture.count('class="arrow"') == 1


def test_dashed_arrows() -> None:
    picture = drawing.layered({"a": set(), "b": {"a"}, "c": {"a"}}, "", {"c": {"a"}})
    assert picture.count('class="arrow rare"') == 1
    assert picture.count('class="arrow"') == 1


# -- what the code says -------------------------------------------------------------------------


def test_what_follows_is_left_out() -> None:
    graph = {"a": set(), "b": {"a"}, "c": {"b", "a"}}
    assert codemap.reduced(graph) == {"a": set(), "b": {"a"}, "c": {"b"}}


def test_names_of_threads_are_followed(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "class Quiet:\n"
        "    def __init__(self, name):\n"
        "        self._name = name\n"
        "    def start(self):\n"
        "        Thread(target=self._run, name=self._name).start()\n"
        "class Pool:\n"
        "    def __init__(self, count, name):\n"
        "        self.pool = ThreadPoolExecutor(count, thread_name_prefix=name)\n"
        "def begin():\n"
        "    def inside():\n"
        "        Thread(target=work, name='plain')\n"
        "    Thread(target=work)\n"
    )
    (tmp_path / "two.py").write_text(
        "def make(settings):\n"
        "    Quiet(f'{settings.id}-quiet')\n"
        "    Pool(3, name=f'{settings.id}-pool')\n"
    )
    found = codemap.Source(codemap.modules(tmp_path)).threads()
    assert [(each.name, each.function, each.runs) for each in found] == [
        ("<id>-quiet", "Quiet.start", "Quiet._run"),
        ("<id>-pool-N", "Pool.__init__", ""),
        ("?", "begin", "work"),
        ("plain", "begin.inside", "work"),
    ]
