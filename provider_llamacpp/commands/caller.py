"""A caller on the bus for the commands: calls functions and reads a channel's frames.

It is a worker like any other, under a name of its own, so that it never takes the name of the
worker that runs beside it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .. import jsontext
from .._version import VERSION
from ..bus import Engine
from ..channel import connect
from ..errors import BusError, ConsumerGone, ProviderError, ProviderLlamacppError
from ..payloads import WriterRef
from ..settings import Settings


class Unreachable(ProviderLlamacppError):
    """The engine cannot be reached; the message says where it was looked for."""


class Caller:
    """A connection to the engine for as long as a command runs.

    :raises Unreachable: if the engine is not there within ``timeout`` seconds
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
        if not self._engine.wait_connected(timeout):
            self._engine.stop()
            where = settings.url.split("?", 1)[0]
            raise Unreachable(
                f"no iii engine answers at {where}: start it, or name its address with --url"
            )

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        reader = WriterRef(refs["reader"]["channel_id"], refs["reader"]["access_key"])
        return refs["writer"], self._frames(reader)

    def _frames(self, reader: WriterRef) -> Iterator[dict[str, Any]]:
        settings = self._settings
        try:
            socket = connect(
                settings.url,
                reader,
                direction="read",
                token=settings.token,
                connect_timeout=settings.connect_timeout,
                ca_file=settings.ca_file,
                client_cert=settings.client_cert,
            )
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
