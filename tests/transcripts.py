"""Strategies for everything that fits the schemas of the contract, by hand.

Few ids and short texts, so that calls, results and names meet often.
"""

from __future__ import annotations

import base64
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# Other tests may keep the processor busy, so no example has a deadline.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEXT = st.text(max_size=6) | st.sampled_from(["", "hi", "\n", "a\ud83d"])
CALL_ID = st.sampled_from(["c1", "c2", "c3", ""])
FUNCTION_ID = st.sampled_from(["fs::read", "fs__read", "a.b", "a b", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
BASE64 = st.binary(min_size=1, max_size=9).map(lambda raw: base64.b64encode(raw).decode())


def fixed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Any:
    """Objects with these members; an optional one may be absent or null."""
    nullable = {name: st.none() | strategy for name, strategy in (optional or {}).items()}
    return st.fixed_dictionaries(required, optional=nullable)


def _block(kind: str, optional: dict[str, Any] | None = None, **required: Any) -> Any:
    return fixed({"type": st.just(kind), **required}, optional)


def blocks(data: Any = BASE64) -> Any:
    """Lists of content blocks; ``data`` is what images hold."""
    plain = st.one_of(
        _block("text", text=TEXT),
        _block("text", text=TEXT),
        _block("image", mime=st.sampled_from(["image/png", "audio/wav", "", "x,y"]), data=data),
        _block("thinking", {"signature": TEXT}, text=TEXT),
        _block("redacted_thinking", data=TEXT),
        _block("function_call", id=CALL_ID, function_id=FUNCTION_ID, arguments=JSON),
    )
    nested = st.recursive(
        plain,
        lambda inner: _block(
            "function_result",
            {"is_error": st.booleans()},
            function_call_id=CALL_ID,
            content=st.lists(inner, max_size=2),
        ),
        max_leaves=3,
    )
    return st.lists(nested, max_size=4)


def messages(data: Any = BASE64) -> Any:
    """Lists of messages of all four roles."""
    content = blocks(data)
    timestamp = st.integers(0, 2**62)
    usage = fixed({}, {"input": st.integers(0, 9), "cost_usd": st.floats(0, 9)})
    user = fixed({"role": st.just("user"), "content": content, "timestamp": timestamp})
    assistant = fixed(
        {
            "role": st.just("assistant"),
            "content": content,
            "stop_reason": st.sampled_from(["end", "length", "function_call", "aborted", "error"]),
            "model": TEXT,
            "provider": TEXT,
            "timestamp": timestamp,
        },
        {
            "error_message": TEXT,
            "error_kind": st.sampled_from(["transient", "permanent"]),
            "native_stop_reason": TEXT,
            "usage": usage,
            "warnings": st.lists(TEXT, max_size=2),
        },
    )
    details = JSON | st.fixed_dictionaries({"status": st.just("denied"), "why": JSON})
    result = fixed(
        {
            "role": st.just("function_result"),
            "function_call_id": CALL_ID,
            "function_id": FUNCTION_ID,
            "content": content,
            "details": details,
            "is_error": st.booleans(),
            "timestamp": timestamp,
        }
    )
    custom = fixed(
        {
            "role": st.just("custom"),
            "custom_type": TEXT,
            "content": content,
            "timestamp": timestamp,
        },
        {"display": TEXT, "details": JSON},
    )
    return st.lists(user | assistant | assistant | result | result | custom, max_size=8)


TOOL = fixed(
    {"name": FUNCTION_ID, "description": TEXT, "parameters": JSON},
    {"label": TEXT, "execution_mode": TEXT},
)
TOOLS = st.lists(TOOL, max_size=4)

MODEL = fixed(
    {
        "id": TEXT,
        "provider": TEXT,
        "context_window": st.integers(0, 2**64 - 1),
        "max_output_tokens": st.integers(0, 2**64 - 1),
    },
    {
        "supports_tools": st.booleans(),
        "thinking_budgets": st.dictionaries(
            st.sampled_from(["low", "high"]), st.integers(0, 2**64 - 1)
        ),
        "reasoning_efforts": st.lists(
            fixed({"effort": st.sampled_from(["low", "high", "max"])}, {"description": TEXT}),
            max_size=2,
        ),
        "pricing": fixed({}, {"input": st.floats(0, 9)}),
    },
)


def stream_payloads(data: Any = BASE64) -> Any:
    """Payloads of ``stream`` that fit the schema and name a channel's write end."""
    return fixed(
        {
            "model": TEXT,
            "messages": messages(data),
            "writer_ref": st.fixed_dictionaries(
                {"channel_id": TEXT, "access_key": TEXT, "direction": st.just("write")}
            ),
        },
        {
            "max_output_tokens": st.integers(0, 2**64 - 1),
            "model_meta": MODEL,
            "provider_options": st.dictionaries(st.text(max_size=5), JSON, max_size=3),
            "resolution_key": TEXT,
            "response_format": st.fixed_dictionaries(
                {"type": st.just("json") | TEXT}, optional={"schema": JSON}
            ),
            "system_prompt": TEXT,
            "thinking_level": st.sampled_from(["minimal", "low", "medium", "high", "xhigh"]),
            "tools": TOOLS,
        },
    )


EMBED_PAYLOADS = fixed({"input": st.lists(TEXT, min_size=1, max_size=4)}, {"model": TEXT})
COUNT_PAYLOADS = fixed(
    {"model": TEXT, "messages": messages().filter(bool)}, {"system_prompt": TEXT, "tools": TOOLS}
)
ABORT_PAYLOADS = fixed({"request_id": TEXT})
