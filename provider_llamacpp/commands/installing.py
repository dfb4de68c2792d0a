"""What to type to install more of this package: it depends on where the package came from."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "provider-llamacpp"


def pip_install(extra: str = "", *, upgrade: bool = False) -> str:
    """The line for a shell that installs ``extra``.

    A package that was installed from a checkout is not to be looked for at an index, which may not
    have it: then the line names the checkout, as ``.`` where that is the working directory.
    """
    checkout, editable = _checkout()
    name = DISTRIBUTION
    if checkout is not None:
        name = "." if checkout == Path.cwd() else str(checkout)
    what = f"'{name}[{extra}]'" if extra else shlex.quote(name)
    options = "--upgrade " if upgrade else ""
    return f"pip install {options}{'-e ' if editable else ''}{what}"


def _checkout() -> tuple[Path | None, bool]:
    """The directory that this package was installed from, if it is still there, and whether it runs
    right from it."""
    here = Path(__file__).resolve().parents[2]
    try:
        # PEP 610: pip writes down where a package came from, unless that was an index.
        text = Distribution.from_name(DISTRIBUTION).read_text("direct_url.json") or "{}"
        told = json.loads(text)
        url, editable = urlsplit(str(told.get("url", ""))), told.get("dir_info", {}).get("editable")
        path = Path(url2pathname(url.path)) if url.scheme == "file" else here
    except (PackageNotFoundError, ValueError, AttributeError):
        path, editable = here, False
    return (path, bool(editable)) if (path / "setup.cfg").is_file() else (None, False)
