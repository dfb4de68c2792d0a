"""What the hub knows of the workers that are connected, and of the functions they serve."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import jsontext
from .profiles import DEFAULT_NAMESPACE

Frame = dict[str, Any]


@dataclass(eq=False)
class Peer:
    """One connection to the control socket.

    :param post: queues the text of a frame for the peer; never blocks
    :param close: sends a Close with this code after what is queued
    :param cut: ends the TCP connection without a Close
    :param closed: whether the connection is over, or on its way there
    """

    post: Callable[[str], None] = field(repr=False)
    close: Callable[[int], None] = field(repr=False)
    cut: Callable[[], None] = field(repr=False)
    closed: Callable[[], bool] = field(repr=False)
    worker_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    reattach_token: str = field(default_factory=secrets.token_hex, repr=False)
    name: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    details: Frame = field(default_factory=dict, repr=False)
    """What the peer said of itself with ``engine::workers::register``."""
    features: frozenset[str] = frozenset()
    declared: bool = False
    """``engine::workers::register`` was seen, or its grace is over."""
    buffered: list[Frame] = field(default_factory=list, repr=False)
    """Registrations that wait for the namespace to be declared (engine protocol 3.3)."""
    refused: bool = False
    """Its name was taken: nothing it sends counts any more, and a Close follows."""
    gone: bool = False

    def send(self, frame: Frame) -> None:
        """:meth:`post` a frame that is not text yet."""
        self.post(jsontext.dumps(frame))


@dataclass(eq=False)
class Function:
    """A function that a peer serves."""

    id: str
    namespace: str
    owner: Peer
    frame: Frame = field(repr=False)

    @property
    def internal(self) -> bool:
        """Hidden from listings unless asked for (engine protocol 2.3)."""
        metadata = self.frame.get("metadata")
        return isinstance(metadata, dict) and metadata.get("internal") is True

    def entry(self, *, schemas: bool = False) -> Frame:
        """The row of ``engine::functions::list``; with ``schemas``, of ``::info``."""
        row: Frame = {
            "function_id": self.id,
            "namespace": self.namespace,
            "worker_name": self.owner.name,
        }
        keys = ["description", "metadata"]
        if schemas:
            keys += ["request_format", "response_format"]
        row.update({key: self.frame[key] for key in keys if self.frame.get(key) is not None})
        return row


@dataclass(eq=False)
class Pending:
    """A call that was handed to a peer and not answered yet."""

    function_id: str
    executor: Peer
    deliver: Callable[[Frame], None] | None
    """Takes ``result`` or ``error`` and the trace fields; None for what nobody waits for."""

    def fail(self, code: str, message: str) -> None:
        """Answer with an error, if anybody waits."""
        if self.deliver is not None:
            self.deliver({"error": {"code": code, "message": message}})


def answer(peer: Peer, invocation_id: str, function_id: str, outcome: Frame) -> None:
    """Send a caller the outcome of its call; a null result travels as an absent one (2.7)."""
    if not peer.gone:
        frame = {key: value for key, value in outcome.items() if value is not None}
        frame |= {
            "type": "invocationresult",
            "invocation_id": invocation_id,
            "function_id": function_id,
        }
        peer.send(frame)
