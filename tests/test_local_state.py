"""The state of the embedded engine where several workers write to it."""

from __future__ import annotations

import threading
from typing import Any

from peers import PATIENCE

from provider_llamacpp.local.state import StateStore

KEY = {"scope": "s", "key": "k"}


def test_no_update_is_lost() -> None:
    store = StateStore()

    def increment() -> None:
        store.update({**KEY, "ops": [{"type": "increment", "path": ""}]})

    other = threading.Thread(target=increment)

    class Slow(dict[str, Any]):
        """An operation that takes so long that another update comes meanwhile."""

        def get(self, name: str, default: Any = None) -> Any:
            if name == "type":
                other.start()
                other.join(0.1)  # it waits for its turn; if it did not, it would be over now
            return super().get(name, default)

    store.update({**KEY, "ops": [Slow(type="increment", path="")]})
    other.join(PATIENCE)
    assert store.get(KEY) == 2
