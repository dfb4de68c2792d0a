"""A worker inside a plain threaded program.

The worker brings its own threads. It installs no signal handlers and no logging, so the program
goes on as it did; here three threads of the program do their work while it serves.
"""

from __future__ import annotations

import threading

from stage import arguments, stage

from provider_llamacpp import FatalError, ProviderWorker, Settings


def main() -> None:
    options = arguments("A worker inside a plain threaded program.").parse_args()
    with stage(options.api_url) as here:
        settings = Settings(url=here.url, api_url=here.api_url, drain=5.0)
        with ProviderWorker(settings) as worker:
            # start() has returned, and nothing is waited for: an engine or a server that is away
            # blocks nobody. Who needs to know waits here.
            try:
                if not worker.wait_ready(30.0):
                    raise SystemExit(f"not ready: {worker.stats()['last_error']}")
            except FatalError as error:  # its name is taken on the bus
                raise SystemExit(str(error)) from error

            def work(number: int) -> None:
                print(f"thread {number}: {here.ask(f'Hello from thread {number}')}")

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        # The block waited up to drain seconds for streams that still ran.
        stats = worker.stats()
        print(f"streams that ended: {stats['outcomes']}, tokens: {stats['usage']['output']}")
    print("stopped")


if __name__ == "__main__":
    main()
