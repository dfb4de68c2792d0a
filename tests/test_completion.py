"""Completion of the command line in a shell, as ``argcomplete`` asks for it."""

from __future__ import annotations

import builtins
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

from provider_llamacpp import cli

PATIENCE = 60
ROOT = pathlib.Path(__file__).parent.parent
PROGRAM = ROOT / "bin" / "provider-llamacpp"
pytest.importorskip("argcomplete")


def completions(line, tmp_path, *command):
    """What the shell would offer behind ``line``."""
    answer = tmp_path / "answer"
    done = subprocess.run(
        command or [sys.executable, str(PROGRAM)],
        env={
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line.encode())),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")
    return {each.strip() for each in answer.read_text(encoding="utf-8").splitlines()}


def test_commands(tmp_path):
    assert set(cli.COMMANDS) <= completions("provider-llamacpp ", tmp_path)
    assert completions("provider-llamacpp st", tmp_path) == {"status"}


def test_flags_of_the_worker(tmp_path):
    assert completions("provider-llamacpp --log-", tmp_path) == {"--log-level", "--log-json"}
    assert completions("provider-llamacpp --log-level w", tmp_path) == {"warning"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("status --on", {"--once"}),
        ("bench --pl", {"--plot"}),
        ("bench --pr", {"--prompt-tokens"}),
        ("local --p", {"--port"}),
        ("chat --th", {"--thinking"}),
        ("doctor --w", {"--wake"}),
        ("service --pr", {"--print"}),
    ],
)
def test_flags_of_a_command(tmp_path, line, offered):
    assert completions(f"provider-llamacpp {line}", tmp_path) == offered


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_its_flags(tmp_path, command):
    found = completions(f"provider-llamacpp {command} --", tmp_path)
    assert {"--help"} < found
    # The worker's own flags are offered in front of the command, not behind each.
    assert "--url" not in found


def test_files(tmp_path):
    (tmp_path / "qwen.gguf").write_bytes(b"")
    assert completions("provider-llamacpp local --model qw", tmp_path) == {"qwen.gguf"}


def test_completing_imports_nothing_heavy(tmp_path):
    code = (
        "import os, sys, argcomplete\n"
        "from provider_llamacpp import cli\n"
        "argcomplete.autocomplete = lambda parser: None\n"
        "cli.main([])\n"
        "print(*sys.modules)"
    )
    env = {**os.environ, "_ARGCOMPLETE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=env
    )
    assert done.returncode == 0, done.stderr
    assert not {"rich", "matplotlib", "dataclasses_json", "xllamacpp"} & set(done.stdout.split())
    assert "provider_llamacpp.worker" not in done.stdout.split()


def test_the_shell_finds_the_marker():
    for name in (
        "bin/provider-llamacpp",
        "provider_llamacpp/cli.py",
        "provider_llamacpp/__main__.py",
    ):
        assert "PYTHON_ARGCOMPLETE_OK" in (ROOT / name).read_text(encoding="utf-8")[:1024]


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setattr(cli, "run_worker", lambda settings: pytest.fail("the worker ran"))


def test_without_argcomplete_nothing_runs(asked, monkeypatch, capsys):
    real = builtins.__import__

    def none(name, *args, **more):
        if name == "argcomplete":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", none)
    assert cli.main([]) == 1
    assert capsys.readouterr() == ("", "")


def test_argcomplete_gets_every_command(asked, monkeypatch):
    import argcomplete

    seen = []
    monkeypatch.setattr(argcomplete, "autocomplete", seen.append)
    assert cli.main(["chat"]) == 1
    (parser,) = seen
    assert parser.parse_args(["bench", "--rounds", "3"]).rounds == 3
    assert parser.parse_args(["status", "--once"]).once is True


def test_argcomplete_is_not_imported_otherwise():
    code = (
        "import sys\nfrom provider_llamacpp.cli import main\n"
        "main(['--version'])\nmain(['--manifest'])\nprint('argcomplete' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if name != "_ARGCOMPLETE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=env
    )
    assert done.stdout.split()[-1] == "False"


def test_an_installed_program_is_completed(tmp_path):
    scripts = pathlib.Path(sysconfig.get_path("scripts"))
    program = scripts / "provider-llamacpp"
    if not program.is_file():
        pytest.skip("the package is not installed here")
    found = completions("provider-llamacpp st", tmp_path, str(program))
    assert found == {"status"}
