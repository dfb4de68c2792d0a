"""A stream while all it does is flow: its steps, as the carrier takes them for many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .answers import Answer
    from .bus.channel import Channel
    from .events.assembler import Assembler


class Flow:
    """The token path of one stream, one step at a time, for the thread that carries it."""

    def __init__(
        self, descriptor: int, stream: Answer, assembler: Assembler, channel: Channel
    ) -> None:
        self.error: Exception | None = None
        """What a step met, for the stream's own thread to raise."""
        self.kept = False
        """The channel had no room for all frames, and waits for its :meth:`~.Channel.flush`."""
        connection = stream.connection
        self.patience = connection.patience
        self.expire = connection.expire
        self._descriptor = descriptor
        self._connection = connection
        self._assembler = assembler
        self._channel = channel

    def fileno(self) -> int:
        """The server's socket."""
        return self._descriptor

    def met(self) -> Exception:
        """The error, taken out: one that is kept would keep all that it passed through."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def step(self) -> bool:
        """What has arrived is read in one go and leaves in one go; False if there is more to do."""
        try:
            connection, assembler = self._connection, self._assembler
            block = connection.arrived()
            if block is None:
                return False
            send = self._channel.send
            if block and (frames := assembler.feed(block)) and not send(frames, wait=False):
                self.kept = True
                return False
            return not (assembler.ended or connection.over)
        except Exception as error:
            self.error = error
            return False
