"""Logging for the command line: one line per event, as text or as JSON.

Used by the command line only; an application that embeds the worker sets up its own logging.
What a model or a peer wrote may stand in a message, so control characters are escaped: no log
line can be forged, and no terminal is steered by one.
"""

from __future__ import annotations

import logging
import re
import sys
import time

from . import jsontext

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    """``text`` with control and direction characters written as ``\\xNN`` or ``\\uNNNN``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """``2026-01-31 12:00:00.123 INFO  provider_llamacpp.calls: …``; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.name}: "
        line = head + escape_control(record.getMessage())
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join("\n    " + escape_control(each) for each in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (seconds since 1970), ``level``, ``logger``, ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return jsontext.dumps(fields)


def set_up(level: str, as_json: bool) -> None:
    """Send the logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("provider_llamacpp").setLevel(level.upper())
