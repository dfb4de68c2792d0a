"""What becomes of a worker after a fork, and what to do there.

Threads do not come along with a fork, so the child has a worker that does nothing. It says so: each
method raises ``RuntimeError``, ``alive`` is false, and ``stop()`` leaves alone what belongs to the
parent, whose worker goes on. The child makes a worker of its own, under a name of its own.

Servers that fork before they serve (gunicorn, uWSGI, multiprocessing's ``fork``) have a hook for
that: gunicorn's ``post_fork``, uWSGI's ``postfork``.
"""

from __future__ import annotations

import os
import sys
import warnings

from stage import Stage, arguments, stage

from provider_llamacpp import ProviderWorker, Settings


def main() -> None:
    options = arguments("What becomes of a worker after a fork.").parse_args()
    with stage(options.api_url) as here:
        settings = Settings(url=here.url, api_url=here.api_url)
        with ProviderWorker(settings) as worker:
            worker.wait_ready(30.0)
            print("parent:", here.ask("Hello"), flush=True)
            with warnings.catch_warnings():
                # Python 3.12 and later warn that a process with threads forks.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                status = 1
                try:
                    in_child(worker, here)
                    status = 0
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            print("parent:", here.ask("Hello"), f"(the child ended with {status})")


def in_child(worker: ProviderWorker, here: Stage) -> None:
    try:
        worker.stats()
    except RuntimeError as error:
        print("child:", error)
    print("child: alive is", worker.alive)
    worker.stop()  # as a "with" block or an atexit handler of the parent's would: does nothing

    own = Settings(url=here.url, api_url=here.api_url, id="child")
    with ProviderWorker(own) as mine:
        print("child: ready is", mine.wait_ready(30.0), "as", mine.settings.name)


if __name__ == "__main__":
    main()
