"""Child processes end when they should, and their last words are kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from provider_llamacpp.local import child as child_module
from provider_llamacpp.local.child import Child, exit_words

POSIX = pytest.mark.skipif(os.name != "posix", reason="Windows has no signals")
DEADLINE = 30.0

# Connects to the given port, so that the end of the process is the end of a connection.
CALLER = """\
import socket, sys, signal
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.sendall(b"here")
"""
# Lives until killed; or, "told", until its input ends.
FOREVER = CALLER + "import time\nwhile True: time.sleep(60)\n"
TOLD = CALLER + "line.sendall(sys.stdin.buffer.readline())\nsys.stdin.buffer.read()\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE)
        yield server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def port_of(listener: socket.socket) -> str:
    return str(listener.getsockname()[1])


def accept(listener: socket.socket, stack: ExitStack) -> socket.socket:
    """The connection of a child that runs by now."""
    line = stack.enter_context(listener.accept()[0])
    line.settimeout(DEADLINE)
    assert line.recv(4) == b"here"
    return line


def run(stack: ExitStack, code: str, *args: str, first_line: bytes | None = None) -> Child:
    child = Child([sys.executable, "-c", code, *args], os.environ, first_line=first_line)
    stack.callback(child.stop)
    return child


def test_keeps_the_last_words(stack: ExitStack) -> None:
    code = "import sys; print('a'); print('\\xff', file=sys.stderr); print('x' * 2000); exit(3)"
    child = run(stack, code)
    assert child.ended.wait(DEADLINE)
    assert child.returncode == 3
    assert sorted(child.lines(), key=len)[-1] == "x" * 500
    assert {"a", "ÿ"} <= set(child.lines())


def test_a_running_child_has_no_exit_code(stack: ExitStack, listener: socket.socket) -> None:
    child = run(stack, FOREVER, port_of(listener))
    accept(listener, stack)
    assert child.returncode is None
    assert not child.ended.is_set()
    assert child.pid != os.getpid()


@POSIX
@pytest.mark.parametrize(("way", "code"), [("terminate", -15), ("kill", -9), ("stop", -15)])
def test_ends_a_program(stack: ExitStack, listener: socket.socket, way: str, code: int) -> None:
    child = run(stack, FOREVER, port_of(listener))
    line = accept(listener, stack)
    getattr(child, way)()
    assert line.recv(1) == b""
    assert child.ended.wait(DEADLINE)
    assert child.returncode == code


@POSIX
def test_a_stubborn_program_is_killed(
    stack: ExitStack, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STOP_SECONDS", 0.05)
    child = run(stack, FOREVER, port_of(listener), "stubborn")
    accept(listener, stack)
    child.stop()
    assert child.returncode == -9


def test_a_told_child_ends_with_its_input(stack: ExitStack, listener: socket.socket) -> None:
    child = run(stack, TOLD, port_of(listener), first_line=b"options")
    line = accept(listener, stack)
    assert line.recv(8) == b"options\n"
    child.stop()
    assert child.returncode == 0
    child.stop()


def test_a_child_that_does_not_listen(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(handle: int, data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("provider_llamacpp.local.child.os", SimpleNamespace(write=write))
    child = run(stack, "exit(4)", first_line=b"options")
    assert child.ended.wait(DEADLINE)
    child.stop()
    assert child.returncode == 4


def test_a_program_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Child([str(tmp_path / "none")], os.environ, first_line=None)


PARENT = """\
import os, sys
from provider_llamacpp.local.child import Child
line = b"options" if sys.argv[1] == "told" else None
child = Child([sys.executable, "-c", sys.argv[2], sys.argv[3]], os.environ, first_line=line)
sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "code"), [("told", TOLD), ("program", FOREVER)])
def test_ends_with_a_parent_that_was_killed(
    stack: ExitStack, listener: socket.socket, kind: str, code: str
) -> None:
    command = [sys.executable, "-c", PARENT, kind, code, port_of(listener)]
    parent = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
    stack.callback(parent.kill)
    line = accept(listener, stack)
    if kind == "told":
        assert line.recv(8) == b"options\n"
    parent.kill()
    assert line.recv(1) == b""


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (1, "exit code 1"), (-200, "signal 200")]
)
def test_exit_words(code: int, words: str) -> None:
    assert exit_words(code) == words


@POSIX
def test_exit_words_of_a_signal() -> None:
    assert exit_words(-9) == "SIGKILL"
