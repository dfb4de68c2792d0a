import pathlib
import shlex
import socket
import sys

import pytest

from provider_llamacpp import Settings, cli
from provider_llamacpp.commands import service
from provider_llamacpp.notify import Notifier

ROOT = pathlib.Path(__file__).parent.parent


def lines(text, name):
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


def test_the_packaged_unit_is_the_one_that_is_printed():
    printed = service.unit(Settings(), ["/usr/bin/provider-llamacpp"])
    assert (ROOT / "packaging" / service.TEMPLATE).read_text() == printed


def test_nothing_is_left_to_fill_in():
    text = service.unit(Settings(), ["/usr/bin/provider-llamacpp"])
    assert not {"@COMMAND@", "@ENVIRONMENT@", "@STOP_SECONDS@"} & set(text.split())
    assert lines(text, "Type") == ["notify"]
    assert lines(text, "DynamicUser") == ["yes"]
    assert lines(text, "ProtectHome") == ["yes"]
    assert lines(text, "TimeoutStopSec") == ["20"]
    assert lines(text, "Environment") == ["MALLOC_ARENA_MAX=1"]


def test_settings_are_filled_in_and_secrets_are_not():
    settings = Settings(
        url="ws://h:1/?a=100%", fat_deltas=True, drain=3, token="tok-1", api_key="key-1"
    )
    text = service.unit(settings, ["/home/joe/my bin/python", "-m", "provider_llamacpp"])
    assert lines(text, "Environment") == [
        '"PROVIDER_LLAMACPP_URL=ws://h:1/?a=100%%"',
        "PROVIDER_LLAMACPP_FAT_DELTAS=true",
        "PROVIDER_LLAMACPP_DRAIN=3",
        "MALLOC_ARENA_MAX=1",
    ]
    assert lines(text, "ExecStart") == ['"/home/joe/my bin/python" -m provider_llamacpp']
    assert lines(text, "ProtectHome") == ["read-only"]
    assert lines(text, "TimeoutStopSec") == ["13"]
    assert "tok-1" not in text
    assert "key-1" not in text


def test_a_line_break_cannot_add_a_line():
    with pytest.raises(ValueError, match="line break"):
        service.unit(Settings(api_url="http://h\nExecStartPre=/bin/evil"), ["x"])


def test_it_prints_how_it_was_called(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bin" / "provider-llamacpp")])
    assert cli.main(["service", "--print"]) == 0
    (command,) = lines(capsys.readouterr().out, "ExecStart")
    assert shlex.split(command) == [sys.executable, str(ROOT / "bin" / "provider-llamacpp")]
    monkeypatch.setattr(sys, "argv", ["/nowhere/__main__.py"])
    assert service.command() == [sys.executable, "-m", "provider_llamacpp"]


@pytest.fixture
def manager(tmp_path):
    """The service manager's end of the socket."""
    if not hasattr(socket, "AF_UNIX"):
        pytest.skip("this system has no such sockets")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock, str(tmp_path / "notify")


def test_ready_is_said_once_and_life_in_time(manager):
    sock, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"})
    notifier.tick(ready=False, alive=False, status="waiting")
    notifier.tick(ready=False, alive=True, status="waiting")
    notifier.tick(ready=True, alive=True, status="serving")
    notifier.tick(ready=True, alive=True, status="serving")
    notifier.stopping()
    said = [sock.recv(999).decode().splitlines()[0] for _ in range(3)]
    assert said == ["WATCHDOG=1", "READY=1", "STOPPING=1"]
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(999)


def test_without_a_manager_nothing_is_said(tmp_path):
    Notifier({}).tick(ready=True, alive=True, status="x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).stopping()
    Notifier({"NOTIFY_SOCKET": "@abstract-and-gone", "WATCHDOG_USEC": "x"}).stopping()


def test_a_program_that_the_units_user_cannot_reach_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(service, "PRIVATE", ())
    home = tmp_path / "home"
    program = home / "venv" / "bin" / "provider-llamacpp"
    program.parent.mkdir(parents=True, mode=0o755)
    program.touch()
    home.chmod(0o755)
    assert service.hidden([str(program), "-m"]) != home
    home.chmod(0o700)
    assert service.hidden([str(program), "-m"]) == home
    monkeypatch.setattr(service, "command", lambda: [str(program)])
    assert cli.main(["service", "--print"]) == 0
    told = capsys.readouterr()
    assert f"cannot look into {home}" in told.err
    assert "cannot look" not in told.out
    monkeypatch.setattr(service, "hidden", lambda words: None)
    assert cli.main(["service", "--print"]) == 0
    assert capsys.readouterr().err == ""


def test_tmp_is_another_one_in_the_unit():
    assert service.hidden(["/tmp/venv/bin/python"]) == pathlib.Path("/tmp")
