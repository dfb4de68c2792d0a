"""Two workers in one process, each with an id of its own.

They share nothing: each has its connection to the bus, its threads, limits and figures. Where two
servers may share a connection and threads, one worker with two providers is smaller:
``Settings(also=(ProviderSettings("pi5", "http://pi5:8080"),))``.
"""

from __future__ import annotations

from stage import arguments, stage

from provider_llamacpp import ProviderWorker, Settings, prometheus_text


def main() -> None:
    options = arguments("Two workers in one process.").parse_args()
    with stage(options.api_url) as here:
        first = Settings(url=here.url, api_url=here.api_url)
        second = Settings(url=here.url, api_url=here.api_url, id="pi5", max_streams=2)
        with ProviderWorker(first) as one, ProviderWorker(second) as two:
            for worker in (one, two):
                if not worker.wait_ready(30.0):
                    raise SystemExit(f"not ready: {worker.stats()['last_error']}")
            for provider in ("llamacpp", "pi5"):
                print(f"{provider}: {here.ask('Hello', provider=provider)}")
            text = prometheus_text(one.stats(), two.stats())
        print(*(line for line in text.splitlines() if "_max_streams{" in line), sep="\n")


if __name__ == "__main__":
    main()
