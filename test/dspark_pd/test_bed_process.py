"""Processes of the bed: nothing survives, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bed_fakes import FAKES, use_fake_servers
from dspark_pd.bed.process import Process, group_members, stop_all

pytestmark = pytest.mark.unit

SLEEP_WITH_CHILD = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)


def child(tmp_path: Path, code: str, name: str = "child") -> Process:
    argv = [sys.executable, "-c", code]
    process = Process(name, argv, dict(os.environ), tmp_path / f"{name}.log")
    process.start()
    return process


def wait_gone(pgid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not group_members(pgid):
            return True
        time.sleep(0.05)
    return False


def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP_WITH_CHILD)
    process.wait_log("(?m)^up$", 10)
    assert len(process.pids()) == 2
    process.stop()
    assert process.pids() == []
    assert not process.alive()
    process.stop()


def test_stop_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = child(tmp_path, code)
    process.wait_log("(?m)^up$", 10)
    process.stop(grace_s=0.2)
    assert process.poll() == -signal.SIGKILL
    assert process.pids() == []


def test_stop_ends_children_of_a_dead_leader(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP_WITH_CHILD)
    process.wait_log("(?m)^up$", 10)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while process.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(process.pids()) == 1
    process.stop(grace_s=0.5)
    assert process.pids() == []


def test_several_share_one_grace_period(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    processes = [child(tmp_path, code, f"c{i}") for i in range(3)]
    for process in processes:
        process.wait_log("(?m)^up$", 10)
    began = time.monotonic()
    stop_all(processes, grace_s=1.0)
    assert time.monotonic() - began < 2.5
    assert not any(process.pids() for process in processes)


def test_wait_log_gives_up_with_the_tail(tmp_path: Path) -> None:
    process = child(tmp_path, "print('only this', flush=True)")
    with pytest.raises(TimeoutError, match="only this"):
        process.wait_log("never written", timeout_s=0.5)
    process.stop()


def start_owner(tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    owner = subprocess.Popen(
        [sys.executable, str(FAKES / "bed_owner.py"), str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    pgid = int(owner.stdout.readline())
    assert group_members(pgid)
    return owner, pgid


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_outlives_the_owner(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    stubborn: bool,
) -> None:
    """Ctrl-C, `kill` and `kill -9` of the program that started the engines."""
    use_fake_servers(monkeypatch, tmp_path)
    if stubborn:
        monkeypatch.setenv("FAKE_STUBBORN", "1")
    owner, pgid = start_owner(tmp_path)
    owner.send_signal(signum)
    owner.wait(timeout=20)
    assert wait_gone(pgid)


def test_a_fork_of_the_owner_leaves_the_engines_alone(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP_WITH_CHILD)
    process.wait_log("(?m)^up$", 10)
    pid = os.fork()
    if pid == 0:
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(pid, 0)
    assert process.alive()
    process.stop()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_background_job_can_be_stopped(signum: signal.Signals) -> None:
    """A script's background job starts with SIGINT ignored."""
    code = (
        "import time\n"
        "from dspark_pd.bed.process import interrupt_on_signals\n"
        "interrupt_on_signals()\n"
        "try:\n    print('up', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise SystemExit(7)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signum)
    assert job.wait(timeout=10) == 7
