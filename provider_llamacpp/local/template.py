"""The chat templates of the tiny models: ChatML with tools and a thinking switch, and without.

The server finds out what a template can do, and how calls and thoughts are written, by rendering
it with different inputs. So the markers that steer the demo model depend on the words of the last
message alone, and stand inside its turn.
"""

from __future__ import annotations

from typing import Final

_PLAIN: Final = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# The index in the first condition is what the server takes as a sign that content may be parts.
_FULL: Final = """\
{%- macro text(content) -%}
{%- if content is string and content[0] -%}
{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro marker(message) -%}
{%- set words = text(message.content) | lower -%}
{%- if message.role == 'tool' -%}
{{- '<|result|>' -}}
{%- elif message.role == 'user' -%}
{%- if CALLS -%}
{{- '<|calls|>' -}}
{%- elif CALL -%}
{{- '<|call|>' -}}
{%- elif 'forever' in words -%}
{{- '<|forever|>' -}}
{%- elif 'ponder' in words -%}
{{- '<|ponder|>' -}}
{%- endif -%}
{%- endif -%}
{%- endmacro -%}
{%- set turns = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = text(messages[0].content) -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- if system or tools or reasoning_effort -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if reasoning_effort -%}
{{- '\\nReasoning effort: ' + reasoning_effort -}}
{%- endif -%}
{%- if tools -%}
{{- '\\nYou may call these tools:\\n<tools>\\n' -}}
{%- for tool in tools -%}
{{- (tool | tojson) + '\\n' -}}
{%- endfor -%}
{{- '</tools>\\nWrite a call as <tool_call>\\n' -}}
{{- '{"name": "...", "arguments": {...}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
{%- if loop.last -%}{{- marker(message) -}}{%- endif -%}
{%- if loop.last or loop.nextitem.role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and message.reasoning_content -%}
{{- '<think>' + message.reasoning_content + '</think>\\n\\n' -}}
{%- endif -%}
{{- text(message.content) -}}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- if not loop.first or text(message.content) -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{%- if call.function.arguments is string -%}
{{- call.function.arguments -}}
{%- else -%}
{{- call.function.arguments | tojson -}}
{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{%- if loop.last -%}{{- marker(message) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""

_ASKED: Final = "tools and 'weather' in words"


def plain_template() -> str:
    """ChatML that knows neither tools nor thinking."""
    return _PLAIN


def chat_template(*, call: str = _ASKED, calls: str = f"{_ASKED} and 'both' in words") -> str:
    """ChatML with tools, thinking switch, reasoning effort and replayed thoughts.

    :param call: template condition under which the last user message gets the marker of one call
    :param calls: the same for two calls at once
    """
    return _FULL.replace("CALLS", calls).replace("CALL", call)
