"""One child process: its own process group, its own log file, a stop that always works.

Life cycle: `Process(...)` -> `start()` -> `poll()` while it runs -> `stop()`. Three
nets catch what the caller forgets: `Bed` stops on exit, `atexit` stops what is left,
and a reaper process kills the groups when this process itself is killed.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dspark_pd.bed.zygote import Forked, zygote_for

_POLL_S = 0.05
_KILL_DEADLINE_S = 10.0
# SGLang looks at a SIGTERM every 5 s, and a router drains for seconds; nothing of ours is
# worth waiting that long for. What ends at once needs no more than this.
_GRACE_S = 0.5


class _Reaper:
    """Line to the helper process of :mod:`dspark_pd.bed.reaper`, started when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[str] | None = None
        self._owner = 0

    def tell(self, sign: str, pgid: int) -> None:
        """Register (`+`) or release (`-`) a process group."""
        with self._lock:
            helper = self._running()
            try:
                assert helper.stdin is not None  # opened as a pipe
                helper.stdin.write(f"{sign}{pgid}\n")
                helper.stdin.flush()
            except (BrokenPipeError, ValueError):
                self._helper = None

    def _running(self) -> subprocess.Popen[str]:
        # A forked child must not talk to (or keep open) its parent's reaper.
        if self._helper is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._helper = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-E",
                    str(Path(__file__).with_name("reaper.py")),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        return self._helper


_reaper = _Reaper()
_running: set[Process] = set()


def group_members(pgid: int) -> list[int]:
    """Live process ids of a group; zombies do not count, nobody can stop those."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        # The command name in parentheses may itself hold spaces and parentheses.
        state, _, group = stat.rpartition(")")[2].split()[:3]
        if int(group) == pgid and state not in "ZX":
            members.append(int(entry))
    return sorted(members)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until a new child is on record.

    An exception out of `Popen` after the fork would leave a child nobody knows of.
    The signals are caught, not blocked: a blocked set would pass on to the child.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    chosen = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, lambda s, _: pending.append(s)) for s in chosen]
    try:
        yield
    finally:
        for signum, handler in zip(chosen, before, strict=True):
            signal.signal(signum, handler)
        for caught in pending:
            signal.raise_signal(caught)


def interrupt_on_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, so that `with Bed` stops all.

    Set even where SIGINT came in ignored, as in a script's background job: a program
    that owns engines must always be stoppable.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)


class Process:
    """A named child that writes to `log`; `argv[0]` is the program."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.log = log
        self._owner = 0
        self._child: subprocess.Popen[bytes] | Forked | None = None

    @property
    def pid(self) -> int:
        """Process id of the child, which is also the id of its group."""
        if self._child is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._child.pid

    def start(self) -> None:
        """Start the child; returns at once, once there is a zygote."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Before the signals are held back: it may have to import for seconds.
        mother = zygote_for(self.argv)
        with self.log.open("ab") as out, _interrupts_deferred():
            out.write(f"$ {' '.join(self.argv)}\n".encode())
            out.flush()
            forked = mother and mother.fork(self.argv, self.env, self.log)
            self._child = forked or self._spawn(out)
            self._owner = os.getpid()
            _running.add(self)
            _reaper.tell("+", self.pid)

    def _spawn(self, out: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Exit status of the child, None while it runs."""
        return None if self._child is None else self._child.poll()

    def alive(self) -> bool:
        """True between a successful `start()` and the end of the child."""
        return self._child is not None and self._child.poll() is None

    def pids(self) -> list[int]:
        """Live process ids of the whole group (engine ranks included)."""
        return group_members(self.pid)

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash would; leaves no process."""
        self.terminate_group(signal.SIGKILL)
        self.join(_KILL_DEADLINE_S)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ask the child to end, then SIGKILL to the whole group; safe to call twice."""
        if self._child is None or self not in _running:
            return
        self.ask_to_end()
        if not self.join(grace_s):
            self.terminate_group(signal.SIGKILL)
            self.join(_KILL_DEADLINE_S)
        self._forget()

    def ask_to_end(self) -> None:
        """SIGTERM to the child alone: engines take the end of a rank for a crash."""
        if self._child is not None and self.alive():
            self._child.terminate()
        else:
            self.terminate_group(signal.SIGTERM)

    def terminate_group(self, signum: int) -> None:
        """Send a signal to every process of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def join(self, timeout_s: float) -> bool:
        """Wait until no process of the group lives; False at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.poll() is not None and not self.pids():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def is_ours(self) -> bool:
        """False in a fork of the process that started the child."""
        return self._owner == os.getpid()

    def _forget(self) -> None:
        _running.discard(self)
        if not self.pids():
            _reaper.tell("-", self.pid)

    def log_text(self) -> str:
        """Everything the child has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def wait_log(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """Wait until the log holds `pattern`; TimeoutError with the tail otherwise."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.search(pattern, self.log_text())
            if found:
                return found
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.name}: {pattern!r} not in its log after {timeout_s:.0f} s\n"
                    + self.log_tail()
                )
            time.sleep(0.2)


def stop_all(processes: Sequence[Process], grace_s: float = _GRACE_S) -> None:
    """Stop several at once: one grace period for all of them."""
    alive = [p for p in processes if p in _running]
    for process in alive:
        process.ask_to_end()
    deadline = time.monotonic() + grace_s
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in alive:
        process.stop(grace_s=0.0)


@atexit.register
def _stop_leftovers() -> None:
    stop_all([p for p in _running if p.is_ours()], grace_s=1.0)
