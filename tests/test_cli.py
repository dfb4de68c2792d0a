"""The command line as a user meets it: a process, its output, its signals, its exit code."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from provider_llamacpp import Settings, cli
from provider_llamacpp.local.engine import LoopbackEngine

PATIENCE = 30
TLS = os.path.join(os.path.dirname(__file__), "data", "tls")
CA, CLIENT = os.path.join(TLS, "ca.pem"), os.path.join(TLS, "client.pem")
BIN = os.path.join(os.path.dirname(__file__), "..", "bin", "provider-llamacpp")


@pytest.fixture
def engine():
    with LoopbackEngine() as engine:
        yield engine


class Process:
    """The worker in a process of its own, its log read line by line."""

    def __init__(self, *arguments, env=None):
        self.lines = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "provider_llamacpp", *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_for(self, text):
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(text in line for line in self.lines), PATIENCE
            ), self.lines

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join()
        self.process.stderr.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_code_0(engine, number):
    with Process("--url", engine.url, "--drain", "5") as worker:
        assert engine.wait_for_function("provider::llamacpp::stream", PATIENCE)
        worker.process.send_signal(number)
        assert worker.process.wait(PATIENCE) == 0


def test_a_taken_name_ends_it_with_one_clear_line(engine):
    with Process("--url", engine.url):
        assert engine.wait_for_function("provider::llamacpp::stream", PATIENCE)
        with Process("--url", engine.url) as second:
            assert second.process.wait(PATIENCE) != 0
            second._reader.join()
    told = [line for line in second.lines if line.startswith("provider-llamacpp:")]
    assert len(told) == 1
    assert "provider-llamacpp" in told[0]
    assert "--id" in told[0]


def test_a_second_id_runs_beside_the_first(engine):
    with Process("--url", engine.url), Process("--url", engine.url, "--id", "pi5"):
        assert engine.wait_for_function("provider::llamacpp::stream", PATIENCE)
        assert engine.wait_for_function("provider::pi5::stream", PATIENCE)


def test_log_lines_can_be_json(engine):
    with Process("--url", engine.url, "--log-json") as worker:
        worker.wait_for("declare")
        fields = json.loads(worker.lines[0])
    assert {"time", "level", "logger", "message"} <= fields.keys()


def test_the_checkout_runs_without_being_installed(tmp_path):
    done = subprocess.run(
        [sys.executable, BIN, "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    assert done.stdout.startswith("provider-llamacpp 0.")


def test_manifest(capsys):
    assert cli.main(["--manifest"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["name"] == "provider-llamacpp"
    assert manifest["default_config"] == {}
    assert "armv7-unknown-linux-gnueabihf" in manifest["supported_targets"]


def test_the_help_names_the_default_of_the_settings(capsys):
    assert Settings().url == cli.USUAL_URL
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert cli.USUAL_URL in capsys.readouterr().out


def test_help_and_version(capsys):
    assert cli.main(["--version"]) == 0
    version = capsys.readouterr().out
    for arguments in (["--help"], ["--url", "ws://h:1", "--version"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.endswith(version)
    assert "examples:" in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"provider-llamacpp {command}" in capsys.readouterr().out.split("examples:")[1]


def test_a_bad_setting_is_named(capsys):
    assert cli.main(["--url", "http://x"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.fixture
def ran(monkeypatch):
    """The settings that the worker was run with; it does not run."""
    seen = []

    def run_worker(settings):
        seen.append(settings)
        return 0

    monkeypatch.setattr(cli, "run_worker", run_worker)
    for name in list(os.environ):
        if name.startswith(("III_", "PROVIDER_LLAMACPP_", "LLAMACPP_")):
            monkeypatch.delenv(name)
    return seen


def test_every_flag_is_a_setting(ran):
    assert cli.main([]) == 0
    assert ran[-1] == Settings()
    flags = (
        f"--url ws://h:1 --id pi5 --api-url http://a:1 --ca-file {CA} --client-cert {CLIENT} "
        "--max-streams 3 --ping-interval 4 --fat-deltas --resume off --drain 5 --log-level debug "
        "--log-json --allow-server-tools read,write_file --allow-model-management"
    )
    assert cli.main(flags.split()) == 0
    assert ran[-1] == Settings(
        url="ws://h:1",
        id="pi5",
        api_url="http://a:1",
        ca_file=CA,
        client_cert=CLIENT,
        max_streams=3,
        ping_interval=4.0,
        fat_deltas=True,
        resume="off",
        drain=5.0,
        log_level="debug",
        log_json=True,
        allow_server_tools=("read", "write_file"),
        allow_model_management=True,
    )
    named = {word[2:].replace("-", "_") for word in flags.split() if word.startswith("--")}
    assert named == set(cli.SETTING_FLAGS)


def test_server_tools_are_granted_to_read_or_by_name(ran, capsys):
    assert cli.main(["--allow-server-tools"]) == 0
    assert ran[-1].allow_server_tools == ("read",)
    assert cli.main(["--allow-server-tools=write_file, edit_file,"]) == 0
    assert ran[-1].allow_server_tools == ("write_file", "edit_file")
    assert cli.main(["--allow-server-tools=all"]) == 2
    assert "allow_server_tools 'all'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--allow-server-tools", "status"])
    assert "status is a command: put the flag behind it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "words"), [("--ca-file", "CA certificates"), ("--client-cert", "certificate and key")]
)
@pytest.mark.parametrize("command", [[], ["chat", "hi"], ["doctor"], ["status"], ["bench"]])
def test_a_certificate_that_is_missing_is_told_at_the_start(
    ran, command, flag, words, tmp_path, capsys
):
    missing = str(tmp_path / "missing.pem")
    assert cli.main([*command, "--url", "wss://127.0.0.1:9", flag, missing]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{missing}: no {words} there (No such file" in told.err
    assert f"({flag})" in told.err
    assert ran == []


def test_a_unit_may_name_a_certificate_of_another_machine(capsys):
    assert cli.main(["service", "--ca-file", "/missing.pem"]) == 0
    assert "PROVIDER_LLAMACPP_CA_FILE=/missing.pem" in capsys.readouterr().out


def test_config_is_accepted_and_ignored_with_a_warning(ran, capsys):
    assert cli.main(["--config", "config.yaml"]) == 0
    assert "config.yaml is ignored" in capsys.readouterr().err


def test_a_misspelt_variable_is_told(ran, capsys, monkeypatch):
    monkeypatch.setenv("PROVIDER_LLAMACPP_MAX_STREAM", "8")
    assert cli.main([]) == 0
    told = capsys.readouterr().err
    assert "PROVIDER_LLAMACPP_MAX_STREAM is no setting, and ignored" in told


def test_a_missing_extra_is_named_not_traced():
    program = """
import sys
from provider_llamacpp import cli

sys.modules["websockets"] = None  # as if it were not installed
for command in (["chat", "--local"], ["local"], ["bench", "--local"]):
    assert cli.main(command) == 1
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stderr.count("needs the package websockets: pip install ") == 3
    assert ran.stderr.count("[local]'") == 3


def test_a_module_missing_for_another_reason_is_not_hidden(monkeypatch):
    from provider_llamacpp.commands import chat

    def run(settings, options):
        raise ModuleNotFoundError("No module named 'gone'", name="gone")

    monkeypatch.setattr(chat, "run", run)
    with pytest.raises(ModuleNotFoundError, match="gone"):
        cli.main(["chat"])


def test_flags_count_before_and_behind_a_command(monkeypatch):
    seen = []
    from provider_llamacpp.commands import chat

    monkeypatch.setattr(chat, "run", lambda settings, options: seen.append(settings) or 0)
    assert cli.main(["--url", "ws://a:1", "chat", "hi"]) == 0
    assert cli.main(["chat", "--url", "ws://b:1", "hi"]) == 0
    assert [settings.url for settings in seen] == ["ws://a:1", "ws://b:1"]


def test_a_failing_command_says_why(monkeypatch, capsys):
    from provider_llamacpp import ProviderError
    from provider_llamacpp.commands import chat

    def run(settings, options):
        raise ProviderError("transient", "it is away")

    monkeypatch.setattr(chat, "run", run)
    assert cli.main(["chat"]) == 1
    assert "it is away" in capsys.readouterr().err

    def interrupted(settings, options):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "run", interrupted)
    assert cli.main(["chat"]) == 130
