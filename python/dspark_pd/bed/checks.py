"""What is looked at before anything starts, so that bad input fails in a second."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_pd.bed.errors import BedError
from dspark_pd.bed.specs import (
    Backend,
    Device,
    EngineSpec,
    base_environment,
    interpreter,
)
from dspark_pd.messages import exit_codes

# Proportional set size, measured: front end and detokenizer 1.4, each rank 0.8.
_ENGINE_BYTES = int(1.4 * 2**30)
_RANK_BYTES = int(0.8 * 2**30)
_RESERVE_BYTES = 2**29
_ERROR_LINES = 5
# The set serves more releases; the demo and its pinned environment are for these.
_RELEASES_RUN = ("0.5.23",)
_REPOSITORY = Path(__file__).resolve().parents[3]

_REQUIREMENTS = "-r requirements/engine-0.5.23.txt"

# Distribution -> what its absence means.
_NEEDED = {
    "sglang": "SGLang",
    "torch": "PyTorch",
    "nixl": "the NIXL wheel (it moves KV from prefill to decode)",
    "nixl-cu13": "the NIXL library wheel",
    "sglang-router": "the router wheel",
    "sglang-cpu-reference": "the CPU reference platform",
}
_PROBE = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Installed:
    """Versions of the distributions that engines need."""

    versions: dict[str, str | None]

    @property
    def sglang(self) -> str:
        return self.versions["sglang"] or ""


def check_installed(device: Device = "cpu") -> Installed:
    """Versions in the engines' interpreter; BedError names what is missing or wrong.

    On a GPU the environment is the user's: any release that the set serves will do,
    and what serves it is the answer of `check_applied`.
    """
    versions = _probe()
    _check_present(versions, device)
    installed = Installed(versions)
    if device == "cpu" and installed.sglang not in _RELEASES_RUN:
        raise BedError(
            f"the demo does not run with SGLang {installed.sglang}",
            expected=f"SGLang {' or '.join(_RELEASES_RUN)} beside {interpreter()}",
            found=installed.sglang,
            cause="SGLang was installed or updated by hand",
            next_step=_pip_install(_REQUIREMENTS),
            usage=True,
        )
    return installed


def _check_present(versions: dict[str, str | None], device: Device) -> None:
    for name, meaning in _NEEDED.items():
        local = name == "sglang-cpu-reference"
        if device == "cuda" and (local or name == "nixl-cu13"):
            continue  # Which library wheel NIXL needs depends on the driver.
        if versions[name] is None:
            raise BedError(
                f"{meaning} is missing",
                expected=f"the distribution {name} in the environment of {interpreter()}",
                found="it is not installed there",
                cause="another environment is active, or the installation did not finish",
                next_step=f"{interpreter()} -m pip install {name}"
                if device == "cuda"
                else _pip_install(
                    "-e python/sglang_cpu_reference" if local else _REQUIREMENTS
                ),
                usage=True,
            )


def _pip_install(what: str) -> str:
    """The command that repairs the environment of the engines, whichever is active."""
    return f"cd {_REPOSITORY} && {interpreter()} -m pip install --no-deps {what}"


def _probe() -> dict[str, str | None]:
    answer = subprocess.run(
        [interpreter(), "-c", _PROBE, *_NEEDED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, str | None] = json.loads(answer.stdout)
    return found


def check_applied(device: Device = "cpu") -> None:
    """BedError unless the patch set is on the SGLang of the engines' interpreter."""
    components = ["--component", "all"] if device == "cpu" else []
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "dspark_pd", "status"),
            *(*components, "--target", interpreter()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if answer.returncode == exit_codes.OK:
        return
    unsupported = answer.returncode == exit_codes.TARGET
    raise BedError(
        "this SGLang release is not served by the patch set"
        if unsupported
        else "the patch set is not applied, or only in part",
        expected=f"an SGLang in the environment of {interpreter()} with the set on it",
        found=_last_words(answer, _ERROR_LINES if unsupported else 1),
        next_step=_pip_install(_REQUIREMENTS)
        if unsupported
        else " ".join(["dspark-pd apply", *components]),
        usage=True,
    )


def _last_words(answer: subprocess.CompletedProcess[str], lines: int) -> str:
    """The summary that status ends with, or its error, on one line."""
    told = (answer.stdout + answer.stderr).splitlines()[-lines:]
    return "; ".join(line.strip() for line in told) or f"exit {answer.returncode}"


def check_backend(backend: Backend) -> None:
    """BedError when engines cannot load what moves their KV.

    NIXL is among what `check_installed` looks for. Mooncake has wheels of several names,
    and needs libraries of the system, so it is loaded as an engine would.
    """
    if backend != "mooncake":
        return
    answer = subprocess.run(
        [interpreter(), "-c", "import mooncake.engine"],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if answer.returncode == 0:
        return
    found = _last_words(answer, 1)
    no_wheel = "No module named" in found
    cause = "the wheel is missing" if no_wheel else ""
    if "cannot open shared object" in found:
        cause = "a library of the system is missing"
    raise BedError(
        "Mooncake's transfer engine does not load",
        expected=f"import mooncake.engine to work in {interpreter()}",
        found=found,
        cause=cause,
        next_step=_pip_install(_REQUIREMENTS)
        if no_wheel
        else "install what it needs (rdma-core has libibverbs), or choose "
        "--transfer-backend nixl",
        usage=True,
    )


def needed_bytes(specs: Sequence[EngineSpec]) -> int:
    """Memory that these engines take when they run at the same time."""
    return _RESERVE_BYTES + sum(
        _ENGINE_BYTES + _RANK_BYTES * spec.tp * spec.pp for spec in specs
    )


def check_memory(specs: Sequence[EngineSpec]) -> None:
    """BedError when the machine or its control group cannot hold the engines."""
    need, have = needed_bytes(specs), available_bytes()
    if have < need:
        raise BedError(
            "too little memory",
            expected=f"{need / 2**30:.1f} GiB free for {len(specs)} engines",
            found=f"{have / 2**30:.1f} GiB",
            cause="other programs use it, or a container limit is low",
            next_step="stop other programs, raise the limit, or ask for fewer --modes",
            usage=True,
        )


def available_bytes(root: Path = Path("/")) -> int:
    """Free memory: the kernel's estimate, or less where a control group limits it."""
    estimates = [_mem_available(root / "proc/meminfo")]
    group = root / "sys/fs/cgroup"
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        estimates.append(limit - used + _reclaimable(group / "memory.stat"))
    return min(estimates)


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise BedError(
        "cannot tell how much memory is free: no MemAvailable", found=str(meminfo)
    )


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    # File cache counts as used, but the kernel gives it back under pressure.
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
