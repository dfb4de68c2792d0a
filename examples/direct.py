"""Without an engine: llama-server read directly, as typed events.

The same requests, the same order of events and the same words for failures as on the bus.
"""

from __future__ import annotations

import threading

from stage import arguments, demo_server

from provider_llamacpp import (
    Client,
    Done,
    Failure,
    ProviderError,
    TextDelta,
    ThinkingDelta,
    count_tokens,
    embed,
    list_models,
    stream_chat,
)


def main() -> None:
    options = arguments("llama-server read directly.").parse_args()
    if options.api_url is None:
        with demo_server() as api_url:
            show(api_url)
    else:
        show(options.api_url)


def show(api_url: str) -> None:
    for model in list_models(api_url=api_url):
        print(f"{model.id}: {model.state}, {model.context_window} tokens, tools {model.tools}")

    print("tokens of the prompt:", count_tokens("What is a slot?", api_url=api_url))

    with stream_chat("What is a slot?", api_url=api_url, thinking_level="low") as stream:
        for event in stream:
            match event:
                case ThinkingDelta(delta=delta) | TextDelta(delta=delta):
                    print(delta, end="", flush=True)
                case Done(message=message):
                    print(f"\n[{message.stop_reason}, {message.usage}]")
                case Failure(error=error):
                    print(f"\n[{error.error_kind}: {error.error_message}]")

    # Who asks often keeps a client: it remembers what it learnt of the server.
    client = Client(api_url)
    first = client.stream_chat("Hello", system_prompt="Be brief.").result()
    again = client.stream_chat(
        [{"role": "user", "content": "Hello"}, first, {"role": "user", "content": "And now?"}]
    )
    print("second turn:", again.result().text)

    # Anybody may end a stream, in any phase: here before its first byte.
    stream = client.stream_chat("Tell me a long story")
    threading.Timer(0.0, stream.close).start()
    print("events of a closed stream come to an end:", sum(1 for _ in stream) >= 0)

    try:
        print("dimensions:", [len(each) for each in embed(["one", "two"], api_url=api_url).vectors])
    except ProviderError as error:  # the server was started without --embeddings
        print("no embeddings:", error.kind, error)


if __name__ == "__main__":
    main()
