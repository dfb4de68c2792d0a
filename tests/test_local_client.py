"""The loopback stack's own bus client, where the network is at fault."""

from __future__ import annotations

from peers import wait_for
from websockets.exceptions import ConnectionClosedError

from provider_llamacpp.local import client
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.engine import LoopbackEngine


def test_an_engine_that_goes_in_the_middle_of_the_handshake_is_tried_again(monkeypatch):
    connect, tries = client.connect, []

    def first_one_breaks(*args, **options):
        tries.append(args)
        if len(tries) == 1:
            raise ConnectionClosedError(None, None)
        return connect(*args, **options)

    monkeypatch.setattr(client, "connect", first_one_breaks)
    with LoopbackEngine() as engine:
        bus = BusClient(engine.url, "someone")
        bus.start()
        try:
            wait_for(lambda: bus.connected, "the second try")
        finally:
            bus.stop()
    assert len(tries) == 2
