"""``service``: a systemd unit for this machine, from the template in ``packaging/``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..settings import ENV_PREFIX, Settings

DESCRIPTION = (
    "Print a hardened systemd unit that runs the worker as it is called now: with this Python, and "
    "with the settings given as flags or environment variables. Keys and tokens are left out; they "
    "belong into /etc/provider-llamacpp.env."
)
EXAMPLE = """\
examples:
  provider-llamacpp service --print
  provider-llamacpp service --print --url ws://10.0.0.2:49134 |
      sudo tee /etc/systemd/system/provider-llamacpp.service
  sudo systemctl enable --now provider-llamacpp
"""
TEMPLATE = "provider-llamacpp.service"
SECRETS = frozenset({"token", "api_key"})
STOP_MARGIN = 10.0
"""Seconds that systemd waits beyond the drain before it kills the worker."""
PRIVATE = (Path("/tmp"), Path("/var/tmp"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--print", action="store_true", help="print the unit (the only thing this command does)"
    )


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    words = command()
    print(unit(settings, words), end="")
    if (place := hidden(words)) is not None:
        print(
            f"provider-llamacpp: the unit runs as a user of its own, who cannot look into {place}: "
            "install the program elsewhere, for example into /opt/provider-llamacpp",
            file=sys.stderr,
        )
    return 0


def hidden(words: list[str]) -> Path | None:
    """A directory on the way to the program that the unit's user cannot enter: one of its owner's
    alone, as home directories are by now, or ``/tmp``, of which the unit gets its own."""
    import stat

    paths = [Path(word) for word in words if os.path.isabs(word)]
    # The Python of a virtual environment is a link to one that may be somewhere else.
    for path in [*paths, *(each.resolve() for each in paths)]:
        for each in path.parents:
            if each in PRIVATE or (each.is_dir() and not each.stat().st_mode & stat.S_IXOTH):
                return each
    return None


def command() -> list[str]:
    """How to run the worker from outside a shell: this Python, and the program that runs now."""
    program = Path(sys.argv[0]).resolve()
    if program.name == "__main__.py" or not program.is_file():
        return [sys.executable, "-m", "provider_llamacpp"]
    return [sys.executable, str(program)]


def unit(settings: Settings, words: list[str]) -> str:
    """The unit's text.

    :param words: the command and its arguments
    """
    import importlib.resources

    text = (importlib.resources.files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    home = any(word.startswith(("/home/", "/root/")) for word in words)
    values = {
        "COMMAND": " ".join(map(quoted, words)),
        "ENVIRONMENT": "\n".join(environment(settings)),
        "STOP_SECONDS": f"{settings.drain + STOP_MARGIN:g}",
        # A Python or a checkout under /home must stay readable.
        "PROTECT_HOME": "read-only" if home else "yes",
    }
    for name, value in values.items():
        # Without a setting to fill in, its line goes too.
        text = text.replace(f"@{name}@" + ("" if value else "\n"), value)
    return text


def environment(settings: Settings) -> list[str]:
    """A line for each setting that differs from its default; no secrets."""
    from dataclasses import fields

    lines = []
    for each in fields(Settings):
        value = getattr(settings, each.name)
        if value != each.default and each.name not in SECRETS:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"Environment={quoted(f'{ENV_PREFIX}{each.name.upper()}={text}')}")
    return lines


def quoted(word: str) -> str:
    """``word`` as one word of a unit file: specifiers and variables are not expanded in it.

    :raises ValueError: for a line break, which a unit file cannot hold
    """
    if "\n" in word or "\r" in word:
        raise ValueError("a setting with a line break cannot stand in a unit file")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or " " in word or not word else word
