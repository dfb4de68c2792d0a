"""``doctor``: walks the whole path and says for each step what is wrong and what to change."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..settings import Settings

if TYPE_CHECKING:
    from .checks import Finding, Findings, Working
    from .terminal import Style, Terminal

DESCRIPTION = """\
Check the whole path: this machine, engine, router, worker, llama-server, model.
Each step says ok, warning or fault, and what to change.
Exit code 0: all well, 1: warnings, 2: faults.
"""
EXAMPLE = """\
examples:
  provider-llamacpp doctor
  provider-llamacpp doctor --wake
  provider-llamacpp doctor --url ws://10.0.0.2:49134 --api-url http://10.0.0.3
  provider-llamacpp doctor --json | jq '.findings[] | select(.level=="fault")'
"""
INDENT = 22
"""Columns before the text of a finding."""
_STYLES: Mapping[str, Style] = {"ok": "good", "warning": "warn", "fault": "bad", "skipped": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--json", action="store_true", help="the findings as one JSON object")
    parser.add_argument(
        "--wake",
        action="store_true",
        help="have the model answer even if it sleeps or must be loaded first",
    )


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    from .checks import exit_code
    from .terminal import Terminal, hold_logs

    hold_logs(settings)
    terminal = Terminal.of(sys.stdout)
    findings: list[Finding] = []
    display = Display(terminal)
    for finding in examine(settings, wake=options.wake, working=_working(Terminal.of(sys.stderr))):
        findings.append(finding)
        if not options.json:
            display.show(finding)
    code = exit_code(findings)
    if options.json:
        print(as_json(findings, code))
    else:
        display.end(findings)
    return code


def examine(
    settings: Settings,
    *,
    wake: bool = False,
    working: Working | None = None,
    environ: Mapping[str, str] | None = None,
    machine: str | None = None,
    root: Path = Path("/"),
    firmware: Callable[[], int | None] | None = None,
) -> Findings:
    """All findings, as they are made.

    :param wake: may wake and load the model
    :param working: shows what is waited for
    :param machine: as :func:`platform.machine` says it
    :param root: where ``proc`` and ``sys`` are
    :param firmware: see :func:`.checks_machine.heat`
    """
    from . import checks_machine as own
    from .checks import skipped

    environ = os.environ if environ is None else environ
    working = working or (lambda label: nullcontext())
    yield own.python()
    packages = own.packages()
    yield packages
    yield own.proxies(environ)
    if packages.level == "fault":
        yield skipped("engine", "engine and llama-server cannot be asked without these packages")
        return
    from .checks_bus import check_bus
    from .checks_server import check_server

    told = yield from check_bus(settings, working)
    seen = yield from check_server(
        settings, told, wake=wake, working=working, proxies=own.proxy_names(environ)
    )
    if own.is_arm(platform.machine() if machine is None else machine):
        yield own.heat(root, firmware or own.throttled_word)
        if seen is not None and seen.here:
            yield own.memory(root, seen.model_size)
        yield own.swap(root)


class Display:
    """Findings as they are made: level, step, and the words beside them.

    Steps that were skipped for one reason become one entry.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._skipped: list[Finding] = []

    def show(self, finding: Finding) -> None:
        """One more."""
        if self._skipped and (finding.level, finding.text) != ("skipped", self._skipped[0].text):
            self._show_skipped()
        if finding.level == "skipped":
            self._skipped.append(finding)
        else:
            self._entry(finding, finding.step, finding.text)

    def end(self, findings: list[Finding]) -> None:
        """The last line: what it comes to."""
        self._show_skipped()
        self._terminal.line(_summary(findings))

    def _show_skipped(self) -> None:
        if self._skipped:
            first, *others = self._skipped
            also = f" (nor {', '.join(each.step for each in others)})" if others else ""
            self._entry(first, first.step, first.text + also)
            self._skipped = []

    def _entry(self, finding: Finding, step: str, words: str) -> None:
        terminal = self._terminal
        style = _STYLES[finding.level]
        text_style: Style = "dim" if finding.level == "skipped" else ""
        first, *more = terminal.wrap(words, INDENT)
        terminal.line((f"{finding.level:<9}", style), f"{step:<13}", (first, text_style))
        for line in more:
            terminal.line(" " * INDENT, (line, text_style))
        arrow = "-> "
        for line in terminal.wrap(finding.remedy, INDENT + len(arrow)) if finding.remedy else ():
            terminal.line(" " * INDENT, arrow, (line, text_style))
            arrow = "   "


def _summary(findings: list[Finding]) -> tuple[str, Style]:
    faults = sum(each.level == "fault" for each in findings)
    warnings = sum(each.level == "warning" for each in findings)
    words = []
    if faults:
        words.append("1 fault" if faults == 1 else f"{faults} faults")
    if warnings:
        words.append("1 warning" if warnings == 1 else f"{warnings} warnings")
    if not words:
        return "All is well.", "good"
    return ", ".join(words) + ".", "bad" if faults else "warn"


def as_json(findings: list[Finding], code: int) -> str:
    """``{"exit_code", "findings"}``; ASCII, whatever a peer wrote."""
    import json

    report = {"exit_code": code, "findings": [each.as_json() for each in findings]}
    return json.dumps(report, indent=2, allow_nan=False)


def _working(terminal: Terminal) -> Working:
    def working(label: str) -> AbstractContextManager[object]:
        return terminal.progress(label) if terminal.live else nullcontext()

    return working
