"""The doctor's look at this machine: Python, packages, proxies and, on a small board, heat, memory
and swap.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from .checks import Finding, fault, ok, skipped, warning
from .installing import pip_install
from .terminal import size

PACKAGES: Mapping[str, str] = {
    "requests": "2.32.2",
    "urllib3": "2",
    "sseclient-py": "1.8",
    "websocket-client": "1.7",
    "dataclasses-json": "0.6.4",
    "backoff": "2.2",
}
"""What the worker runs on, and since which version; a test holds it to ``setup.cfg``."""
EXTRAS: Mapping[str, str] = {"terminal": "rich", "local": "websockets", "bench": "matplotlib"}
"""One package of each extra that shows whether it is there."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy")

HOT = 80.0
"""Degrees: most boards slow down between 80 and 85."""
LITTLE = 256 * 1024 * 1024
"""Bytes beside the model that a board needs to stay usable."""
SWAPPING = 64 * 1024 * 1024
"""Bytes in swap that are more than what was pushed out once and never missed."""
_THROTTLED = {
    0: "too little voltage",
    1: "the clock is capped",
    2: "it is throttled",
    3: "it is near its limit of heat",
}
"""The bits of the firmware's word that tell of now."""


def is_arm(machine: str) -> bool:
    """Whether ``machine``, as :func:`platform.machine` says it, is one of the small boards."""
    return machine.lower().startswith(("arm", "aarch"))


def python() -> Finding:
    """The interpreter."""
    version = platform.python_version()
    words = f"{version} on {platform.system()} {platform.machine()}"
    return ok("python", words, version=version)


def packages(version: Callable[[str], str] = importlib.metadata.version) -> Finding:
    """What the worker runs on.

    :param version: of a package; raises ``PackageNotFoundError``
    """
    found: dict[str, str | None] = {}
    for name in (*PACKAGES, *EXTRAS.values()):
        try:
            found[name] = version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    missing = [name for name in PACKAGES if found[name] is None]
    old = [name for name, least in PACKAGES.items() if _older(found[name], least)]
    remedy = pip_install(upgrade=True)
    if missing:
        text = f"missing: {', '.join(missing)}"
        return fault("packages", text, remedy, versions=found)
    if old:
        text = "too old: " + ", ".join(f"{name} {found[name]}" for name in old)
        return warning("packages", text, remedy, versions=found)
    text = f"all {len(PACKAGES)} are there, and none is too old"
    if found["rich"] is None:
        more = f"for colours and live figures: {pip_install('terminal')}"
        return ok("packages", text, more, versions=found)
    return ok("packages", text, versions=found)


def _older(found: str | None, least: str) -> bool:
    return found is not None and _numbers(found) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def proxy_names(environ: Mapping[str, str]) -> list[str]:
    """The variables that name a proxy; what they hold may be secret."""
    return sorted(
        name for name, value in environ.items() if name.lower() in PROXIES and value.strip()
    )


def proxies(environ: Mapping[str, str]) -> Finding:
    """Proxies of the environment, which the worker does not use."""
    names = proxy_names(environ)
    if not names:
        return ok("proxies", "none in the environment", names=[])
    text = f"{', '.join(names)}: not used; engine and llama-server are connected to directly"
    return ok("proxies", text, names=names)


# -- small boards -----------------------------------------------------------------------------


def heat(root: Path, firmware: Callable[[], int | None]) -> Finding:
    """Temperature and throttling.

    :param root: where ``sys`` is
    :param firmware: its word about throttling; None if it has none
    """
    zones = root.glob("sys/class/thermal/thermal_zone*/temp")
    degrees = [value / 1000 for zone in zones if (value := _number(zone)) is not None]
    word = firmware() or 0
    signs = [words for bit, words in _THROTTLED.items() if word >> bit & 1]
    for device in root.glob("sys/class/thermal/cooling_device*"):
        kind = _text(device / "type").lower()
        if ("cpu" in kind or "processor" in kind) and (_number(device / "cur_state") or 0) > 0:
            signs.append("the clock is lowered because of heat")
    if not degrees and not signs:
        return skipped("heat", "this machine does not tell its temperature")
    hottest = max(degrees, default=None)
    text = "; ".join(([f"{hottest:.0f} C"] if hottest is not None else []) + signs)
    facts = {"celsius": hottest, "signs": signs}
    if "too little voltage" in signs:
        return warning(
            "heat", text, "take a stronger power supply: the board slows down without", **facts
        )
    if signs or (hottest or 0) >= HOT:
        return warning("heat", text, "cool the board (heat sink, fan): hot, it slows down", **facts)
    return ok("heat", text, **facts)


def throttled_word() -> int | None:
    """What ``vcgencmd get_throttled`` says; None where there is no such program."""
    program = shutil.which("vcgencmd")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "get_throttled"], capture_output=True, text=True, timeout=5.0
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"0x([0-9a-fA-F]+)", done.stdout)
    return int(found[1], 16) if found else None


def memory(root: Path, model_size: int | None) -> Finding:
    """What is left beside the model.

    :param root: where ``proc`` is
    :param model_size: bytes of the model that runs on this machine; None if not known
    """
    facts = _meminfo(root)
    total, available = facts.get("MemTotal"), facts.get("MemAvailable")
    if total is None or available is None:
        return skipped("memory", "this machine does not tell its memory")
    if model_size is None:
        return skipped("memory", f"{size(available)} free; the size of the model is not known")
    # A model in memory of its own is counted as used already; a mapped file counts as available,
    # though each token needs all of it.
    mapped = facts.get("AnonPages", 0) < model_size
    left = available - model_size if mapped else available
    numbers = {"total": total, "available": available, "model": model_size, "left": left}
    remedy = "take a smaller model or quantisation, a smaller --ctx-size, or stop other programs"
    if left < 0:
        text = f"the model ({size(model_size)}) and the rest do not fit into {size(total)}"
        return warning(
            "memory", f"{text}: it is read from the disk again and again", remedy, **numbers
        )
    text = f"{size(left)} of {size(total)} left beside the model ({size(model_size)})"
    if left < LITTLE:
        return warning("memory", text, remedy, **numbers)
    return ok("memory", text, **numbers)


def swap(root: Path) -> Finding:
    """Whether the machine swaps."""
    facts = _meminfo(root)
    total, free = facts.get("SwapTotal"), facts.get("SwapFree")
    if total is None or free is None:
        return skipped("swap", "this machine does not tell its swap")
    if total == 0:
        return ok("swap", "none", total=0, used=0)
    used = total - free
    text = f"{size(used)} of {size(total)} used"
    if used > SWAPPING:
        remedy = "what is swapped is slow: a smaller model or --ctx-size, or fewer programs"
        return warning("swap", text, remedy, total=total, used=used)
    return ok("swap", text, total=total, used=used)


def _meminfo(root: Path) -> dict[str, int]:
    """The numbers of ``/proc/meminfo`` in bytes."""
    lines = re.findall(r"^(\w+):\s+([0-9]+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in lines}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
