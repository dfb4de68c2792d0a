"""A caller on the bus for the commands: calls functions and reads a channel's frames.

It is a worker like any other, under a name of its own, so that it never takes the name of the
worker that runs beside it.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

from .. import jsontext
from .._version import VERSION
from ..bus.channel import connect
from ..bus.engine import Engine
from ..bus.link import origin
from ..errors import BusError, ConsumerGone, ProviderError, ProviderLlamacppError
from ..payloads import WriterRef
from ..settings import Settings


class Unreachable(ProviderLlamacppError):
    """The engine cannot be reached."""

    remedy = "start the iii engine, or name its address with --url (III_URL)"

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: {self.remedy}")
        self.problem = problem
        """Where it was looked for, and what came of it."""


class Caller:
    """A connection to the engine for as long as a command runs.

    :raises Unreachable: if the engine refuses, or is not there within ``timeout`` seconds
    """

    def __init__(self, settings: Settings, *, timeout: float = 5.0) -> None:
        self._settings = settings
        self._engine = Engine(
            settings.url,
            name=f"{settings.name}-cli-{os.getpid()}-{uuid.uuid4().hex[:6]}",
            version=VERSION,
            description="provider-llamacpp at a terminal",
            token=settings.token,
            namespace=settings.namespace,
            ca_file=settings.ca_file,
            client_cert=settings.client_cert,
            connect_timeout=settings.connect_timeout,
        )
        self._engine.start()
        deadline = time.monotonic() + timeout
        # One try is enough for a person who waits: what refuses now is not asked again.
        while not self._engine.wait_connected(0.1):
            refused = self._engine.last_error
            if refused is None and time.monotonic() < deadline:
                continue
            self._engine.stop()
            where = origin(settings.url)
            reason = refused or f"no answer within {timeout:g} s"
            reason = reason.removeprefix("cannot connect: ").removeprefix(f"{where}: ")
            reason = re.sub(r"^\[Errno -?[0-9]+\] ", "", reason)
            raise Unreachable(f"no iii engine answers at {where} ({reason})")

    @property
    def features(self) -> list[str] | None:
        """What an engine of 0.25 or later says it can do; None from an older one."""
        return self._engine.features

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.stop()

    def call(self, function_id: str, data: object, *, timeout: float = 15.0) -> Any:
        """Call a function and wait for its result.

        :raises BusError: as it failed
        """
        own = not function_id.startswith(("engine::", "state::"))
        namespace = self._settings.namespace if own else None
        return self._engine.invoke(function_id, data, timeout=timeout, namespace=namespace)

    def open_channel(self) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """A new channel: the writer reference to hand out, and the frames that arrive.

        The frames end when the writer closes.
        """
        refs = self.call("engine::channels::create", {})
        return refs["writer"], self._frames(refs["reader"])

    def _frames(self, reader: dict[str, str]) -> Iterator[dict[str, Any]]:
        try:
            socket = read_end(self._settings, reader)
        except (ConsumerGone, ProviderError) as error:
            raise BusError("channel", f"the answer's channel cannot be read: {error}") from error
        try:
            socket.settimeout(None)
            while True:
                text = socket.recv()
                if not text:
                    return
                frame = jsontext.loads(text)
                if isinstance(frame, dict):
                    yield frame
        finally:
            socket.shutdown()


def read_end(settings: Settings, reader: dict[str, str]) -> Any:
    """The socket at the end of a channel that is read, of a reader reference as the engine gave it.

    :raises ConsumerGone: if the engine has no such channel
    :raises ProviderError: if it cannot be reached
    """
    return connect(
        settings.url,
        WriterRef(reader["channel_id"], reader["access_key"]),
        direction="read",
        token=settings.token,
        connect_timeout=settings.connect_timeout,
        ca_file=settings.ca_file,
        client_cert=settings.client_cert,
    )
