"""What the tests of the doctor share: a walk, and a bus in front of a scripted server."""

import contextlib
import json

from peers import free_port

from provider_llamacpp import ProviderWorker, Settings
from provider_llamacpp.commands.doctor import examine
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter

SECRET = "sk-do-not-show-me"
MACHINE = "x86_64"
BUS = ("engine", "router", "worker", "state", "registration", "catalog")
"""The steps that need an engine."""


def nowhere():
    return f"ws://127.0.0.1:{free_port()}"


def look(settings=None, **options):
    """The findings by step, none of them with a secret in it."""
    options.setdefault("machine", MACHINE)
    options.setdefault("environ", {})
    findings = list(examine(settings or Settings(url=nowhere()), **options))
    by_step = {each.step: each for each in findings}
    assert len(by_step) == len(findings), "each step once"
    for each in findings:
        assert each.remedy or each.level in ("ok", "skipped")
    assert SECRET not in json.dumps([each.as_json() for each in findings])
    return by_step


def direct(server, **settings):
    """Settings for a server without an engine."""
    return Settings(url=nowhere(), api_url=server.url, **settings)


class Bus:
    """Engine, router and worker, as they run."""

    def __init__(self, engine, router, settings):
        self.engine = engine
        self.router = router
        self.settings = settings


@contextlib.contextmanager
def bus_before(server):
    """Engine, router and worker in front of ``server``."""
    with LoopbackEngine() as engine, LoopbackRouter(engine.url, environ={}) as router:
        settings = Settings(url=engine.url, api_url=server.url)
        with ProviderWorker(settings) as worker:
            assert worker.wait_ready(30.0)
            yield Bus(engine, router, settings)
