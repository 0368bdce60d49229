"""Kill apply and revert at every system call that changes the disk.

Each round forks, counts the calls in the child and sends SIGKILL at the n-th one; a
write is cut in the middle. Then both verbs must be able to go on from what is left. The
trees are small, so all points are tried, not a sample.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fake_sglang
from dspark_pd.patchset.patch_set import load_patch_set
from dspark_pd.planning import astgrep
from dspark_pd.target import fsops
from dspark_pd.verbs import context
from fake_sglang import snapshot
from outcome import Run

pytestmark = pytest.mark.unit

MINIMUM_POINTS = 60
"""Per verb and repair: more than 240 kills in all, and the random ones besides."""

_CALLS = (
    "chmod",
    "close",
    "fchmod",
    "fchown",
    "fsync",
    "lchown",
    "mkdir",
    "open",
    "replace",
    "rmdir",
    "symlink",
    "unlink",
    "utime",
)


@pytest.fixture(autouse=True)
def remembered_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask ast-grep and read the set once: neither changes between the rounds."""
    real = cache(astgrep.scan)
    monkeypatch.setattr(astgrep, "scan", lambda searches: real(tuple(searches)))
    monkeypatch.setattr(context, "load_patch_set", cache(load_patch_set))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(point: int) -> None:
    """Make the ``point``-th changing call of this process the last one."""
    left = point

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            if left == 0:
                _die()
            left -= 1
            return real(*arguments, **named)

        return call

    def write(handle: int, data: bytes) -> None:
        nonlocal left
        if left == 0:
            os.write(handle, data[: len(data) // 2])
            _die()
        left -= 1
        os.write(handle, data)

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fsops._write_all = write


def _killed(run: Run, verb: str, site: Path, point: int) -> bool:
    """Run ``verb`` in a child that dies at ``point``; False if it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            _arm(point)
            code = run(verb, "--target", site, "--component", "all").code
        except BaseException:
            code = 99
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, f"{verb} failed before point {point}"
    return False


def _points(
    run: Run, site: Path, verb: str, ready: Callable[[], None]
) -> Iterator[int]:
    """Yield each point after ``verb`` was killed there."""
    point = 0
    while True:
        ready()
        if not _killed(run, verb, site, point):
            return
        yield point
        point += 1


@pytest.mark.parametrize("repair", ["apply", "revert"])
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_either_verb_repairs_a_kill_at_any_point(
    run: Run,
    site: Path,
    verb: str,
    repair: str,
    record_property: Callable[[str, object], None],
) -> None:
    fake_sglang.install(site, "1.1.0")
    original = snapshot(site)
    run("apply", "--target", site, "--component", "all")
    applied = _without_state(snapshot(site))

    def ready() -> None:
        other = "revert" if verb == "apply" else "apply"
        assert run(other, "--target", site, "--component", "all").code == 0

    tried = 0
    for point in _points(run, site, verb, ready):
        ask = point % 10 == 0
        assert not ask or run("status", "--target", site).code in (0, 1), point
        outcome = run(repair, "--target", site, "--component", "all")
        assert outcome.code == 0, (point, outcome.codes)
        if repair == "apply":
            assert not ask or run("status", "--target", site).code == 0, point
            assert _without_state(snapshot(site)) == applied, point
            assert run("revert", "--target", site).code == 0
        assert snapshot(site) == original, point
        tried += 1
    record_property("kill_points", tried)
    assert tried >= MINIMUM_POINTS


def test_only_apply_says_that_it_repaired(run: Run, site: Path) -> None:
    journal = site / "sglang/.dspark_pd/journal.json"
    for point in range(0, 200, 5):
        assert _killed(run, "apply", site, point)
        if journal.exists():
            break
    target = ("--target", site)
    for verb in (["status"], ["diff"], ["apply", "--dry-run"]):
        notes = run(*verb, *target).document["notes"]
        assert notes == [
            f"an earlier apply was cut off: dspark-pd apply --target {site} finishes "
            f"it, dspark-pd revert --target {site} takes it back"
        ], verb
    notes = run("apply", *target).document["notes"]
    assert notes[0] == "an earlier apply was cut off; repaired"


def test_kills_during_repairs_are_repaired(run: Run, site: Path) -> None:
    """Several runs in a row, each killed at a random point of whatever it finds."""
    fake_sglang.install(site, "1.1.0")
    original = snapshot(site)
    chance = random.Random(20260101)
    for _ in range(40):
        for _ in range(chance.randint(1, 4)):
            _killed(
                run, chance.choice(["apply", "revert"]), site, chance.randrange(150)
            )
        assert run("apply", "--target", site).code == 0
        assert run("status", "--target", site).code == 0
        for _ in range(chance.randint(0, 2)):
            _killed(run, "revert", site, chance.randrange(150))
        assert run("revert", "--target", site).code == 0
        assert snapshot(site) == original


def test_an_assumed_release_outlives_a_killed_revert(run: Run, site: Path) -> None:
    """Else the target is of no known release until the user vouches for it again."""
    info = site / f"sglang-{fake_sglang.LATEST}.dist-info"
    info.rename(info.with_name("sglang-1.3.0.dist-info"))
    original = snapshot(site)
    journal = site / "sglang/.dspark_pd/journal.json"
    assumed = ["--assume-version", fake_sglang.LATEST]
    told = []
    for point in range(0, 60, 6):
        assert run("apply", "--target", site, *assumed).code == 0
        if _killed(run, "revert", site, point) and journal.exists():
            told.append(run("status", "--target", site).document["target"]["source"])
        assert run("revert", "--target", site).code == 0
        assert snapshot(site) == original, point
    assert told and set(told) == {"assumed at apply"}


def _without_state(tree: dict[str, object]) -> dict[str, object]:
    return {name: item for name, item in tree.items() if ".dspark_pd" not in name}
