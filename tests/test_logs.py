import json
import logging
import sys

import pytest

from provider_llamacpp.logs import JsonFormatter, TextFormatter, escape_control, set_up


def record(message, *args, error=None):
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    return logging.LogRecord("provider_llamacpp.x", logging.INFO, "f", 1, message, args, info)


@pytest.fixture
def root():
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = handlers, level
    logging.getLogger("provider_llamacpp").setLevel(logging.NOTSET)


def test_a_line_cannot_be_forged():
    line = TextFormatter().format(record("model said %s", "x\n2026 ERROR forged\x1b[2J\u202e"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert "\\n2026 ERROR forged\\x1b[2J\\u202e" in line


def test_a_traceback_keeps_its_lines_indented():
    line = TextFormatter().format(record("failed", error=ValueError("bad\rthing")))
    assert "\n    ValueError: bad\\rthing" in line


def test_json_lines():
    fields = json.loads(JsonFormatter().format(record("a %d", 1, error=ValueError("b"))))
    assert fields["message"] == "a 1"
    assert fields["level"] == "info"
    assert fields["logger"] == "provider_llamacpp.x"
    assert "ValueError: b" in fields["exception"]
    assert "exception" not in json.loads(JsonFormatter().format(record("a")))


def test_escape_leaves_text_alone():
    assert escape_control("héllo 🌍") == "héllo 🌍"


@pytest.mark.parametrize("as_json", [False, True])
def test_set_up_writes_to_standard_error(root, capsys, as_json):
    set_up("info", as_json)
    logging.getLogger("provider_llamacpp.y").info("here")
    logging.getLogger("urllib3").info("not here")
    err = capsys.readouterr().err
    assert "here" in err
    assert "not here" not in err
    assert err.startswith("{") is as_json
