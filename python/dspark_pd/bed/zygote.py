"""Servers forked from one process that has imported SGLang already.

Importing SGLang costs seven seconds of a core; a test run starts dozens of engines.
Life cycle: the first :func:`zygote_for` a known module starts the zygote and waits for
its import; each :meth:`Zygote.fork` then takes milliseconds. The zygote ends with this process.
Whatever it cannot do (another interpreter, another SGLang, an environment that SGLang
has already read), it leaves to the caller, and so does a zygote that failed.

``DSPARK_PD_ZYGOTE=0`` starts every server the usual way.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_pd.bed.specs import base_environment

_SERVERS = ("sglang.launch_server", "sglang_router.launch_router")
_PRELOAD = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    *_SERVERS,
)
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 30.0  # a fork takes milliseconds


class Forked:
    """A server that the zygote forked; answers like a `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._status: int | None = None

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        if self._status is None:
            answer = self._zygote.ask({"pid": self.pid})
            if answer is not None:
                self._status = answer["status"]
            elif not _lives(self.pid):
                # Nobody is left who knows how it ended.
                self._status = -signal.SIGKILL
        return self._status

    def terminate(self) -> None:
        """SIGTERM to the server alone."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Zygote:
    """The process that forks, and the line to it.

    It ends when this process does; the servers are the reaper's.
    """

    def __init__(
        self, python: str, modules: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        script = str(Path(__file__).with_name("zygote_main.py"))
        self._lock = threading.Lock()
        self._asked = 0
        self._process = subprocess.Popen(
            [python, script, *modules],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # else an answer may wait where select does not see it
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self.works = False
        try:
            self.works = self._answer(_START_TIMEOUT_S) == b"ready\n"
        except TimeoutError:
            pass
        finally:
            if not self.works:
                self._process.kill()

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to an order; None once the zygote has failed."""
        with self._lock:
            self._asked += 1
            line = json.dumps({**order, "id": self._asked})
            answer: dict[str, Any] = {}
            try:
                self._orders.write(line.encode() + b"\n")
                self._orders.flush()
                # An earlier question may have been interrupted before its answer.
                while answer.get("id") != self._asked:
                    answer = json.loads(self._answer(_ANSWER_TIMEOUT_S))
            except (OSError, ValueError):
                self.works = False
                return None
        return answer

    def _answer(self, timeout_s: float) -> bytes:
        """The next line; empty at the end. Raises TimeoutError."""
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise TimeoutError
        return self._answers.readline()

    def fork(
        self, argv: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Forked | None:
        """Run `PYTHON -m MODULE ...`, its output appended to `log`, which exists.

        None where it must start the usual way.
        """
        order = {"module": argv[2], "argv": argv[3:], "environ": dict(environ)}
        answer = self.ask({**order, "log": str(log)})
        if answer is None:
            return None
        if answer["pid"] is None:
            with log.open("a") as out:
                out.write(f"# not forked: {', '.join(answer['read'])} was read\n")
            return None
        return Forked(self, answer["pid"])


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# By process, since a fork must not share its parent's, and by interpreter.
_zygotes: dict[tuple[int, str], Zygote] = {}


def zygote_for(argv: Sequence[str]) -> Zygote | None:
    """The zygote that can fork the server of this command line; None without one.

    Waits for its import the first time.
    """
    if os.environ.get("DSPARK_PD_ZYGOTE") == "0":
        return None
    if len(argv) < 3 or argv[1] != "-m" or argv[2] not in _SERVERS:
        return None
    key = os.getpid(), argv[0]
    if key not in _zygotes:
        _zygotes[key] = Zygote(argv[0], _PRELOAD, base_environment())
    return _zygotes[key] if _zygotes[key].works else None
