"""The doctor on the machine: packages, proxies, and the heat and memory of a small board."""

import configparser
import importlib.metadata
import pathlib
import re
import subprocess

import pytest
from looking import direct, look, nowhere
from scripted_llama import ScriptedLlama

from provider_llamacpp import Settings
from provider_llamacpp.commands import checks_machine
from provider_llamacpp.commands.checks import fault


@pytest.fixture
def llama_like():
    with ScriptedLlama() as server:
        yield server


# -- the machine -----------------------------------------------------------------------------------


def test_packages_are_those_of_the_setup():
    setup = configparser.ConfigParser()
    setup.read(pathlib.Path(__file__).parent.parent / "setup.cfg", encoding="utf-8")
    lines = setup["options"]["install_requires"].split("\n")
    wanted = dict(re.fullmatch(r"(\S+) >=(\S+)", line).groups() for line in lines if line)
    assert wanted == checks_machine.PACKAGES


def versions(**found):
    def version(name):
        value = found.get(name.replace("-", "_"), "99")
        if value is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return value

    return version


def test_packages():
    assert checks_machine.packages(versions()).level == "ok"
    found = checks_machine.packages(versions(backoff=None, requests=None))
    assert found.level == "fault"
    assert "requests, backoff" in found.text and "pip install" in found.remedy
    found = checks_machine.packages(versions(requests="2.9.2", backoff="new"))
    assert found.level == "warning"
    assert "requests 2.9.2, backoff new" in found.text
    found = checks_machine.packages(versions(rich=None))
    assert found.level == "ok" and "terminal" in found.remedy


def test_missing_packages_end_the_walk(monkeypatch):
    broken = fault("packages", "missing: requests", "pip install")
    monkeypatch.setattr(checks_machine, "packages", lambda: broken)
    found = look()
    assert list(found) == ["python", "packages", "proxies", "engine"]
    assert found["engine"].level == "skipped"


def board(root, *, degrees=(), cooling=None, meminfo=""):
    for at, each in enumerate(degrees):
        zone = root / f"sys/class/thermal/thermal_zone{at}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(f"{each}\n")
    if cooling is not None:
        device = root / "sys/class/thermal/cooling_device0"
        device.mkdir(parents=True)
        (device / "type").write_text("cpufreq-cpu0\n")
        (device / "cur_state").write_text(f"{cooling}\n")
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(meminfo)
    return root


MEGABYTE = 1024  # in kB


def meminfo(**numbers):
    return "".join(f"{name}:  {count * MEGABYTE} kB\n" for name, count in numbers.items())


@pytest.mark.parametrize(
    ("degrees", "cooling", "word", "level", "words", "remedy"),
    [
        ([48312, 51000], None, None, "ok", "51 C", ""),
        ([83000], None, None, "warning", "83 C", "heat sink"),
        ([70000], 2, None, "warning", "the clock is lowered", "heat sink"),
        ([70000], 0, 0x50000, "ok", "70 C", ""),
        ([70000], None, 0x4, "warning", "throttled", "heat sink"),
        ([70000], None, 0x50005, "warning", "too little voltage", "power supply"),
        ([], None, 0x8, "warning", "limit of heat", "heat sink"),
        ([], None, None, "skipped", "does not tell", ""),
        (["hot"], None, None, "skipped", "does not tell", ""),
    ],
)
def test_heat(tmp_path, degrees, cooling, word, level, words, remedy):
    root = board(tmp_path, degrees=degrees, cooling=cooling)
    found = checks_machine.heat(root, lambda: word)
    assert found.level == level
    assert words in found.text and remedy in found.remedy


@pytest.mark.parametrize(
    ("numbers", "size", "level", "words"),
    [
        # A mapped model is counted as available.
        ({"MemTotal": 8000, "MemAvailable": 6000, "AnonPages": 500}, 4000, "ok", "left beside"),
        (
            {"MemTotal": 8000, "MemAvailable": 4100, "AnonPages": 500},
            4000,
            "warning",
            "left beside",
        ),
        ({"MemTotal": 8000, "MemAvailable": 3000, "AnonPages": 500}, 4000, "warning", "do not fit"),
        # One in memory of its own is not.
        ({"MemTotal": 8000, "MemAvailable": 3000, "AnonPages": 4500}, 4000, "ok", "left beside"),
        (
            {"MemTotal": 8000, "MemAvailable": 100, "AnonPages": 4500},
            4000,
            "warning",
            "left beside",
        ),
        ({"MemTotal": 8000, "MemAvailable": 3000}, None, "skipped", "not known"),
        ({}, 4000, "skipped", "does not tell"),
    ],
)
def test_memory(tmp_path, numbers, size, level, words):
    root = board(tmp_path, meminfo=meminfo(**numbers))
    found = checks_machine.memory(root, size and size * MEGABYTE * 1024)
    assert found.level == level and words in found.text
    assert ("--ctx-size" in found.remedy) is (level == "warning")


@pytest.mark.parametrize(
    ("numbers", "level"),
    [
        ({"SwapTotal": 0, "SwapFree": 0}, "ok"),
        ({"SwapTotal": 2000, "SwapFree": 1990}, "ok"),
        ({"SwapTotal": 2000, "SwapFree": 500}, "warning"),
        ({}, "skipped"),
    ],
)
def test_swap(tmp_path, numbers, level):
    assert checks_machine.swap(board(tmp_path, meminfo=meminfo(**numbers))).level == level


def test_a_machine_that_tells_nothing(tmp_path):
    assert checks_machine.swap(tmp_path / "nowhere").level == "skipped"


@pytest.mark.parametrize("machine", ["armv7l", "aarch64", "arm64"])
def test_a_small_board(tmp_path, llama_like, machine):
    numbers = meminfo(MemTotal=4000, MemAvailable=3000, AnonPages=9, SwapTotal=100, SwapFree=0)
    root = board(tmp_path, degrees=[85000], meminfo=numbers)
    found = look(direct(llama_like), machine=machine, root=root, firmware=lambda: None)
    assert found["heat"].level == "warning"
    assert found["memory"].facts["model"] == 2_000_000_000
    assert found["swap"].level == "warning"


def test_a_small_board_whose_server_is_elsewhere(tmp_path):
    root = board(tmp_path, degrees=[50000])
    settings = Settings(url=nowhere(), api_url="http://[::ffff:127.0.0.1]:1")
    found = look(settings, machine="aarch64", root=root, firmware=lambda: None)
    assert "memory" not in found and found["heat"].level == "ok"
    settings = Settings(url=nowhere(), api_url="http://board.invalid:8080")
    assert "memory" not in look(settings, machine="aarch64", root=root, firmware=lambda: None)


@pytest.mark.parametrize(
    ("output", "word"), [("throttled=0x50005\n", 0x50005), ("error\n", None), (None, None)]
)
def test_the_word_of_the_firmware(monkeypatch, output, word):
    def run(command, **options):
        assert command == ["/usr/bin/vcgencmd", "get_throttled"]
        if output is None:
            raise OSError("broken")
        return subprocess.CompletedProcess(command, 0, output, "")

    monkeypatch.setattr(checks_machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(checks_machine.subprocess, "run", run)
    assert checks_machine.throttled_word() == word
    monkeypatch.setattr(checks_machine.shutil, "which", lambda name: None)
    assert checks_machine.throttled_word() is None
