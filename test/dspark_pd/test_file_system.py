"""Full disks, missing rights, a second writer."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_sglang
from dspark_pd.target import fsops
from fake_sglang import snapshot
from outcome import Run

pytestmark = pytest.mark.unit

RELAY = "sglang/srt/managers/relay.py"


class Failing:
    """Lets ``calls`` pass, then fails once or from there on."""

    def __init__(self, real: Callable[..., Any], calls: int, error: int, ever: bool):
        self.real, self.left, self.error, self.ever = real, calls, error, ever
        self.failed = False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.left == 0 and (self.ever or not self.failed):
            self.failed = True
            raise OSError(self.error, os.strerror(self.error))
        self.left = max(0, self.left - 1)
        return self.real(*arguments, **named)


def _break(
    monkeypatch: pytest.MonkeyPatch, name: str, calls: int, error: int, ever: bool
) -> Failing:
    # os.write serves subprocesses as well: only the tool's own writing shall fail.
    owner, attribute = (fsops, "_write_all") if name == "write" else (os, name)
    failing = Failing(getattr(owner, attribute), calls, error, ever)
    monkeypatch.setattr(owner, attribute, failing)
    return failing


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("ever", [True, False], ids=["for good", "once"])
@pytest.mark.parametrize("operation", ["write", "replace", "fsync", "mkdir"])
def test_a_full_disk_at_any_step_loses_nothing(
    run: Run,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    ever: bool,
    operation: str,
) -> None:
    """After a failure the tree is as before, or both verbs can repair it."""
    fake_sglang.install(site, "1.1.0")
    original = snapshot(site)
    if verb == "revert":
        run("apply", "--target", site)
    before = snapshot(site)
    for calls in range(60):
        with monkeypatch.context() as patch:
            failing = _break(patch, operation, calls, errno.ENOSPC, ever)
            outcome = run(verb, "--target", site)
        if not failing.failed:
            break
        if outcome.code == 0:
            # The asked state was reached; only tidying up failed.
            assert run(verb, "--target", site).code == 0
        else:
            assert (outcome.code, outcome.codes) == (6, ["F502"])
            if "nothing was changed" in outcome.document["errors"][0]["next"]:
                assert _content(snapshot(site)) == _content(before)
        run("revert", "--target", site)
        assert snapshot(site) == original, f"{operation} {calls}"
        if verb == "revert":
            run("apply", "--target", site)
    else:
        pytest.fail("the operation never came to its end")
    assert calls or operation == "mkdir"


def _content(tree: dict[str, object]) -> dict[str, object]:
    """Leave out the state folder: a kept original more is no change of the target."""
    return {name: item for name, item in tree.items() if ".dspark_pd" not in name}


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_a_read_only_target_is_named(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    before = snapshot(site)
    with monkeypatch.context() as patch:
        _break(patch, "mkdir", 0, error, ever=True)
        outcome = run("apply", "--target", site)
    assert (outcome.code, outcome.codes) == (6, ["F501"])
    assert snapshot(site) == before


def test_missing_rights_are_found_before_the_first_change(
    run: Run, site: Path, tmp_path: Path
) -> None:
    """Real rights, as another user where the tests run as root."""
    folder = site / "sglang/srt/managers"
    if os.geteuid() == 0:
        _open_the_way_to(tmp_path)
        _give_away(site, 65534)
    before = snapshot(site)

    def apply() -> int:
        os.chmod(folder, 0o555)
        outcome = run("apply", "--target", site)
        os.chmod(folder, 0o755)
        assert str(folder) in outcome.document["errors"][0]["found"]
        return outcome.code

    assert _as_user(65534, apply) == 6
    assert snapshot(site) == before


def _as_user(user: int, act: Callable[[], int]) -> int:
    """Return what ``act`` returns in a child of that user, or of ours if not root."""
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setegid(user)
                os.seteuid(user)
            code = act()
        except BaseException:
            code = 99
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _open_the_way_to(folder: Path) -> None:
    for place in (folder, *folder.parents[:3]):
        place.chmod(stat.S_IMODE(place.stat().st_mode) | 0o055)


def _give_away(folder: Path, user: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, user, user)


@pytest.fixture
def umask_077() -> Iterator[None]:
    """What a hardened root shell has."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_new_files_and_folders_are_like_the_folder_they_lie_in(
    run: Run, site: Path, umask_077: None
) -> None:
    managers = site / "sglang/srt/managers"
    managers.chmod(0o2775)
    assert run("apply", "--target", site).code == 0
    modes = {
        "srt/managers/relay_guard.py": 0o664,
        "srt/agreement": 0o755,
        "srt/agreement/rules.py": 0o644,
        ".dspark_pd": 0o755,
        ".dspark_pd/originals": 0o755,
        ".dspark_pd/record.json": 0o644,
    }
    for path, mode in modes.items():
        found = stat.S_IMODE((site / "sglang" / path).stat().st_mode)
        assert oct(found) == oct(mode), path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to a user")
def test_root_leaves_the_files_of_another_user_to_that_user(
    run: Run, site: Path, tmp_path: Path, umask_077: None
) -> None:
    user = 65534
    relay = site / RELAY
    fake_sglang.install(site, "1.1.0")
    start = relay.parent.parent / "start.py"
    start.rename(tmp_path / "start.py")
    start.symlink_to(tmp_path / "start.py")
    relay.chmod(0o600)
    _give_away(site, user)
    os.chown(tmp_path / "start.py", user, user)
    os.chown(relay, user, user + 1)
    _open_the_way_to(tmp_path)
    before = snapshot(site)
    assert run("apply", "--target", site).code == 0
    for path in site.rglob("*"):
        group = user + 1 if path == relay else user
        assert (path.lstat().st_uid, path.lstat().st_gid) == (user, group), path
    assert stat.S_IMODE(relay.stat().st_mode) == 0o600
    assert _as_user(user, lambda: run("status", "--target", site).code) == 0
    relay.unlink()
    assert run("apply", "--target", site).code == 0, "a lost file comes back"
    assert (relay.stat().st_uid, relay.stat().st_gid) == (user, user)
    relay.chmod(0o600)
    os.chown(relay, user, user + 1)
    assert run("revert", "--target", site).code == 0
    assert snapshot(site) == before


def test_a_second_writer_is_refused(run: Run, site: Path) -> None:
    handle = os.open(site / "sglang", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        for verb in ("apply", "revert"):
            outcome = run(verb, "--target", site)
            assert (outcome.code, outcome.codes) == (6, ["F504"])
        assert run("status", "--target", site).code == 1, "reading needs no lock"
    finally:
        os.close(handle)
    assert run("apply", "--target", site).code == 0


def test_a_file_system_that_locks_only_files_is_served(
    run: Run, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS emulates locks and wants a file that is open for writing."""
    real = fcntl.flock

    def no_folders(handle: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", no_folders)
    before = snapshot(site)
    assert run("apply", "--target", site).code == 0
    with (site / "sglang/.dspark_pd.lock").open("w") as file:
        real(file, fcntl.LOCK_EX)
        assert run("revert", "--target", site).codes == ["F504"]
    assert run("revert", "--target", site).code == 0
    assert snapshot(site) == before


def test_two_at_once_end_in_one_good_state(run: Run, site: Path) -> None:
    before = snapshot(site)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(run("apply", "--target", site).code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
    assert set(codes) <= {0, 6}
    assert 0 in codes
    assert run("status", "--target", site).code == 0
    run("revert", "--target", site)
    assert snapshot(site) == before


def test_a_temporary_file_left_behind_does_not_hinder(run: Run, site: Path) -> None:
    before = snapshot(site)
    left = fsops.temporary_of(site / RELAY)
    left.write_text("half")
    assert run("apply", "--target", site).code == 0
    assert run("revert", "--target", site).code == 0
    assert snapshot(site) == before
