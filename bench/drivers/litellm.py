"""Peer: LiteLLM's proxy in front of the stub; the sink is its client.

``python -m bench.drivers.litellm STUB_PORT PROXY_PORT CONFIG`` writes the configuration there and
becomes the proxy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Write the configuration and hand over to the proxy."""
    stub, port, config = sys.argv[1:4]
    route = {"model": "openai/stub", "api_base": f"http://127.0.0.1:{stub}/v1", "api_key": "none"}
    models = [{"model_name": "stub", "litellm_params": route}]
    # JSON is YAML.
    Path(config).write_text(json.dumps({"model_list": models}), encoding="utf-8")
    # Without the first it asks the internet for prices when it starts.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["LITELLM_LOG"] = "ERROR"
    run = "from litellm import run_server; run_server()"
    arguments = ["--config", config, "--host", "127.0.0.1", "--port", port, "--telemetry", "False"]
    os.execv(sys.executable, [sys.executable, "-c", run, *arguments])


if __name__ == "__main__":
    main()
