"""Wheels of SGLang's releases, from the package index, kept in a cache.

Nothing of upstream is stored in the repository. The cache folder can be named by
``SGLANG_DSPARK_PD_WHEEL_CACHE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_TIMEOUT_S = 600
# One wheel per release, whatever machine runs the test: the Python files are the same.
_ONE_KIND = (
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
    "--platform=manylinux_2_34_x86_64",
    "--only-binary=:all:",
)


def cache_folder() -> Path:
    default = Path.home() / ".cache" / "sglang-dspark-pd" / "wheels"
    return Path(os.environ.get("SGLANG_DSPARK_PD_WHEEL_CACHE", default))


def wheel(release: str) -> Path:
    """Return the wheel of ``release``; without it skip, or fail under ``CI=true``."""
    folder = cache_folder()
    found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    if found:
        return found[0]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += [*_ONE_KIND, "-d", str(folder), f"sglang=={release}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    if found:
        return found[0]
    reason = f"no wheel of SGLang {release}: {done.stderr.strip()[-300:]}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def unpack(release: str, site: Path) -> Path:
    """Unpack the Python files and the metadata of a release; return its ``sglang``."""
    with zipfile.ZipFile(wheel(release)) as archive:
        names = [
            name
            for name in archive.namelist()
            if ".dist-info/" in name
            or (name.endswith(".py") and name.startswith("sglang/"))
        ]
        archive.extractall(site, names)
    return site / "sglang"
