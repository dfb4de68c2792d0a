"""The processes of a measurement: starting, talking, and what they cost."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from .pipes import Json, listen

ROOT = Path(__file__).parent.parent
PATIENCE = 20.0
"""Seconds that any answer may take. LiteLLM takes longer to start."""


class BenchError(Exception):
    """A measurement could not be taken."""


class NoAnswer(BenchError):
    """What was waited for did not come in time."""


def bare_python(directory: Path) -> str:
    """An interpreter that starts with nothing added, made when first asked for.

    It runs everything here, with the packages of this environment on its path: like an ordinary
    install. This environment's own start may import much more (the finder of an editable install,
    or whatever else its ``.pth`` files name), which would count as time and memory of the driver.
    """
    path = directory / "bare"
    if not path.exists():
        venv.create(path, symlinks=os.name != "nt")
    return str(path / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def clean_environment() -> dict[str, str]:
    """This process's environment without what would steer a driver: proxies, keys, addresses."""
    steering = ("III_", "PROVIDER_", "OPENAI_", "LITELLM_", "LLAMACPP_", "PYTHON")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(steering) and not name.lower().endswith("_proxy")
    }
    paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def machine_seconds() -> float:
    """Processor seconds that all processes of the machine have used so far."""
    # Only those who measure need the extra.
    import psutil

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def wait_for_quiet(limit: float = 0.2, patience: float = 60.0) -> None:
    """Wait until other processes use no more than ``limit`` of a core, but not for ever."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = machine_seconds()
        time.sleep(0.5)
        if (machine_seconds() - before) / 0.5 <= limit:
            return


class Child:
    """One process.

    :param talks: it speaks the line protocol of :mod:`.pipes`
    :param log: where its standard error goes
    :param more: environment beside :func:`clean_environment`
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        talks: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._errors: IO[bytes] = log.open("wb")
        pipe = subprocess.PIPE if talks else subprocess.DEVNULL
        self.started_ns = time.monotonic_ns()
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe if talks else self._errors,
            stderr=self._errors,
            cwd=ROOT,
            env={**clean_environment(), **(more or {})},
            start_new_session=True,
        )
        self._events: queue.Queue[Json] = queue.Queue()
        if talks:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "gone"})

    def ask(self, do: str, **facts: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **facts}).encode() + b"\n")
        self.process.stdin.flush()

    def expect(self, event: str, timeout: float = PATIENCE) -> Json:
        """Wait for an event; earlier ones are passed over.

        :raises NoAnswer: if it does not come
        :raises BenchError: if the process ends instead
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                got = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NoAnswer(f"no {event!r} in time") from None
            if got["event"] == event:
                return got
            if got["event"] == "gone":
                raise BenchError(f"ended before {event!r}: {self.words()}")

    def words(self) -> str:
        """The last it said on standard error."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-800:].strip()

    def cpu_seconds(self) -> float:
        """Processor time, user and system, of all its threads so far."""
        if sys.platform == "linux":
            # Its CPU clock (clock_getcpuclockid(3)): nanoseconds, where /proc counts hundredths.
            return time.clock_gettime((~self.process.pid << 3) | 2)
        times = self._facts().cpu_times()
        return float(times.user + times.system)

    def _facts(self) -> Any:
        import psutil

        return psutil.Process(self.process.pid)

    def rss(self) -> int:
        """Resident bytes."""
        return int(self._facts().memory_info().rss)

    def peak_rss(self) -> int:
        """The most it ever had resident, in bytes; what it has now where that is not known."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return self.rss()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def threads(self) -> int:
        """How many threads it has."""
        return int(self._facts().num_threads())

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, by force if it does not go."""
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # It went with something unsaid.
        self._errors.close()


@dataclass(frozen=True, slots=True)
class Places:
    """Where a driver finds the others."""

    stub: int
    sink: int
    own: int
    """A port of its own, if it listens."""
    directory: Path
    key: str = field(repr=False)
    """What it asks of its clients, if it does."""


@dataclass(frozen=True, slots=True)
class Driver:
    """What is measured."""

    name: str
    label: str
    role: Literal["ours", "peer", "limit"]
    how: Literal["engine", "channel", "bytes", "http"]
    """How streams begin and where they go (:mod:`.sink`)."""
    ready: str
    """The sink's event that says it is ready; blank: when it answers on its own port."""
    command: Callable[[Places], Sequence[str]]
    flat_tokens: int
    """How long a stream to measure it flat out with."""
    by: Literal["received", "sent"] = "received"
    patience: float = PATIENCE


def _python(at: Places) -> Sequence[str]:
    return bare_python(at.directory), "-m"


def _ours(at: Places) -> Sequence[str]:
    command = [*_python(at), "provider_llamacpp", "--url", f"ws://127.0.0.1:{at.sink}"]
    return [*command, "--api-url", f"http://127.0.0.1:{at.stub}", *OURS_MORE]


def _module(name: str) -> Callable[[Places], Sequence[str]]:
    def command(at: Places) -> Sequence[str]:
        return [*_python(at), f"bench.drivers.{name}", str(at.stub), str(at.sink)]

    return command


def _litellm(at: Places) -> Sequence[str]:
    ports = [str(at.stub), str(at.own)]
    config = str(at.directory / "litellm.json")
    return [*_python(at), "bench.drivers.litellm", *ports, config]


OURS_MORE: list[str] = []
"""More flags for our worker, from the command line of the bench."""

DRIVERS = {
    driver.name: driver
    for driver in (
        Driver("ours", "this worker", "ours", "engine", "reconciled", _ours, 50_000),
        Driver(
            "sdk_httpx",
            "iii-sdk + httpx",
            "peer",
            "engine",
            "function",
            _module("sdk_httpx"),
            10_000,
        ),
        Driver(
            "openai_ws",
            "openai + websocket-client",
            "peer",
            "channel",
            "plain",
            _module("openai_ws"),
            5_000,
        ),
        Driver("litellm", "LiteLLM proxy", "peer", "http", "", _litellm, 1_000, patience=120.0),
        Driver("raw", "raw socket copy", "limit", "bytes", "plain", _module("raw"), 50_000),
        Driver(
            "parse",
            "requests + sseclient + json, unsent",
            "limit",
            "bytes",
            "plain",
            _module("parse"),
            20_000,
            by="sent",
        ),
    )
}


class Rig:
    """Stub, sink and one driver, all started fresh."""

    def __init__(self, driver: Driver, directory: Path, *, upstream: int | None = None) -> None:
        self.driver = driver
        module = [bare_python(directory), "-m"]
        self.stub = Child([*module, "bench.stub"], directory / "stub.log", talks=True)
        self.sink = Child([*module, "bench.sink"], directory / "sink.log", talks=True)
        stub, sink = self.stub.expect("port")["port"], self.sink.expect("port")["port"]
        with listen() as listener:
            own = listener.getsockname()[1]
        key = f"sk-{secrets.token_hex(16)}"
        self.places = Places(upstream or stub, sink, own, directory, key)
        self.child = Child(
            driver.command(self.places),
            directory / f"{driver.name}.log",
            more={"LITELLM_MASTER_KEY": key} if driver.how == "http" else None,
        )

    def wait_ready(self) -> int:
        """Wait until the driver can take streams; when that was, in monotonic nanoseconds."""
        if self.driver.ready:
            event = self.expect(self.driver.ready)
            return int(event.get("at", time.monotonic_ns()))
        deadline = time.monotonic() + self.driver.patience
        url = f"http://127.0.0.1:{self.places.own}/health/liveliness"
        while time.monotonic() < deadline and self.child.process.poll() is None:
            try:
                urllib.request.urlopen(url, timeout=1.0).close()
                return time.monotonic_ns()
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise BenchError(f"{self.driver.name}: did not start; {self.child.words()}")

    def expect(self, event: str, timeout: float | None = None, *, of: Child | None = None) -> Json:
        """Wait for an event while the driver lives.

        :param timeout: None is the driver's patience
        :param of: None is the sink
        :raises NoAnswer: if it does not come
        :raises BenchError: if the driver ends
        """
        deadline = time.monotonic() + (self.driver.patience if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            try:
                return (of or self.sink).expect(event, max(0.0, min(0.5, left)))
            except NoAnswer:
                if self.child.process.poll() is not None:
                    words = self.child.words()
                    raise BenchError(f"{self.driver.name} ended: {words}") from None
                if left <= 0:
                    raise

    def plan(
        self, *, tokens: int | None, rate: float | None, lockstep: bool = False, streams: int = 1
    ) -> None:
        """How the stub answers from now on."""
        self.stub.ask("plan", tokens=tokens, rate=rate, lockstep=lockstep, streams=streams)
        self.stub.expect("planned")

    def open(self, streams: int, *, tokens: int = 32_000) -> None:
        """Begin streams."""
        at = self.places
        self.sink.ask(
            "open", streams=streams, how=self.driver.how, port=at.own, key=at.key, tokens=tokens
        )

    def report(self, since: int = 0, until: int = 1 << 62) -> Json:
        """What all streams so far came to."""
        self.sink.ask("report", since=since, until=until, by=self.driver.by)
        return self.sink.expect("report", 60.0)

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for child in (self.child, self.sink, self.stub):
            child.stop()
