"""Checks the links between built pages: ``python docs/extensions/links.py build/docs``.

Sphinx checks the references it resolves itself; this checks what came out, anchors included.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.add(value)


def broken(root: Path) -> list[str]:
    """The links below ``root`` that lead nowhere; those to other sites are not followed."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in root.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            if not target.exists():
                found.append(f"{path.relative_to(root)}: {link}: no such page")
            elif known is not None and unquote(parts.fragment) not in known.anchors:
                found.append(f"{path.relative_to(root)}: {link}: no such place on the page")
    return found


def main(root: str) -> int:
    """Print what is broken; the exit code."""
    faults = broken(Path(root).resolve())
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
