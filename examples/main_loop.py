"""Inside a main loop that must not wait, as those of Tk and Qt: a queue hands callbacks over.

A thread reads the answer. What concerns the window is put into a queue as a callable, and the loop
takes it out: no widget is ever touched by another thread. ``--tk`` takes a real window; else a loop
with the same methods, which needs no display. For Qt, replace ``after`` by a ``QTimer``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from stage import arguments, demo_server

from provider_llamacpp import ChatStream, Client, Event, Failure, TextDelta

Callback = Callable[[], None]


class Root(Protocol):
    """What is needed of ``tkinter.Tk``."""

    def after(self, ms: int, func: Callback) -> Any: ...

    def mainloop(self) -> None: ...

    def quit(self) -> None: ...


class Loop:
    """A main loop without a window."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Callback]] = []
        self._over = False

    def after(self, ms: int, func: Callback) -> None:
        """Call ``func`` in ``ms`` milliseconds."""
        self._due.append((time.monotonic() + ms / 1000, func))

    def mainloop(self) -> None:
        """Run until :meth:`quit`."""
        while not self._over:
            at, func = min(self._due, key=lambda each: each[0])
            self._due.remove((at, func))
            time.sleep(max(0.0, at - time.monotonic()))
            func()

    def quit(self) -> None:
        """Leave :meth:`mainloop`."""
        self._over = True


class Conversation:
    """One answer in a window: ``show`` gets text, ``over`` is called at its end."""

    def __init__(self, root: Root, show: Callable[[str], None], over: Callback) -> None:
        self._root = root
        self._show = show
        self._over = over
        self._calls: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._stream: ChatStream | None = None
        self._take()

    def ask(self, client: Client, text: str) -> None:
        """From the loop: returns at once."""
        self._stream = stream = client.stream_chat(text, max_output_tokens=200)
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def cancel(self) -> None:
        """From the loop, a button or a closed window: returns at once, in every phase."""
        if self._stream is not None:
            self._stream.close()

    def _take(self) -> None:
        """In the loop: what the other thread wants done, 50 times a second."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            call()
        self._root.after(20, self._take)

    def _read(self, stream: ChatStream) -> None:
        """On the thread: touches nothing but the queue."""
        with stream:
            for event in stream:
                self._calls.put(lambda event=event: self._seen(event))  # type: ignore[misc]
        self._calls.put(self._over)

    def _seen(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._show(event.delta)
        elif isinstance(event, Failure):
            self._show(f"[{event.error.error_message}]")


def main() -> None:
    parser = arguments("A main loop that must not wait.")
    parser.add_argument("--tk", action="store_true", help="a real window")
    options = parser.parse_args()
    if options.api_url is None:
        with demo_server() as api_url:
            run(api_url, tk=options.tk)
    else:
        run(options.api_url, tk=options.tk)


def run(api_url: str, *, tk: bool) -> None:
    loop_thread = threading.current_thread()
    root: Root
    if tk:
        import tkinter

        window = tkinter.Tk()
        text = tkinter.Text(window)
        text.pack()
        root = window

        def show(piece: str) -> None:
            text.insert("end", piece)

    else:
        root = Loop()

        def show(piece: str) -> None:
            assert threading.current_thread() is loop_thread
            print(piece, end="", flush=True)

    ticks = [0]

    def tick() -> None:
        ticks[0] += 1
        root.after(5, tick)

    conversation = Conversation(root, show, root.quit)
    root.after(0, tick)
    root.after(0, lambda: conversation.ask(Client(api_url), "Hello"))
    root.mainloop()
    print(f"\nthe loop went on all the while: {ticks[0] > 1}")


if __name__ == "__main__":
    main()
