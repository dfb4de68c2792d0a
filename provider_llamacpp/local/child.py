"""A child process that ends with this one, and whose last words can be read.

For the servers of the embedded stack. The child is out of reach of an interrupt at our terminal:
whoever started it ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

STOP_SECONDS: Final = 5.0
"""For the process to end by itself before it is killed."""
_LOG_LINES: Final = 400
"""Of its output, the newest, that are kept to be shown."""
_LOG_WIDTH: Final = 500
"""Characters of each."""

# A process of its own that ends the child once we, at the other end of the pipe, are gone.
_GUARD: Final = """\
import os, signal, sys
sys.stdin.buffer.read()
try:
    os.kill(int(sys.argv[1]), signal.SIGTERM)
except OSError:
    pass
"""


class Child:
    """A running process; made running.

    :param first_line: given to the child on its standard input, which then stays open as long as
        we live: such a child is to end when it ends. None is for a program that does not know
        this rule: its input is empty, and a small guard process ends it in our place.
    :raises OSError: the program cannot be run
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], *, first_line: bytes | None
    ) -> None:
        self.ended = threading.Event()
        """Set once it has ended."""
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._process = _spawn(
            command,
            stdin=subprocess.DEVNULL if first_line is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="child-log", daemon=True
        )
        self._reader.start()
        self._guard: subprocess.Popen[bytes] | None = None
        if first_line is not None:
            self._tell(first_line)
        else:
            self._guard = _spawn(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(self.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            # Past the buffer, so that nothing is left to be written, and to fail, on closing.
            os.write(self._process.stdin.fileno(), line + b"\n")
        except OSError:
            pass  # it is gone already, and its exit code says so

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in iter(lambda: stream.readline(_LOG_WIDTH), b""):
                self._lines.append(line.decode("utf-8", "replace").rstrip())
        self._process.wait()
        self.ended.set()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """The last lines of its output, standard and error, 400 at most."""
        return list(self._lines)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM; on Windows it is ended at once)."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once (SIGKILL), and wait for its end."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, gently at first, and let go of all that belongs to it; may be called again."""
        if self._guard is not None:
            # First: its signal must never reach a later process of the same number.
            self._guard.kill()
            self._guard.wait()
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard = None
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(STOP_SECONDS)


def exit_words(code: int | None) -> str:
    """``exit code 1``, or the name of the signal that ended it."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _spawn(command: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
    if sys.platform == "win32":  # pragma: no cover
        streams["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        streams["start_new_session"] = True
    return subprocess.Popen(command, stderr=subprocess.STDOUT, **streams)
