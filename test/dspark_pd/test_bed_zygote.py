"""A server forked from the zygote behaves as one started by itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_pd.bed.zygote import Forked, Zygote, zygote_for

pytestmark = pytest.mark.unit

SERVER = """
import json, os, sys, time
with open(os.environ["REPORT"], "w") as file:
    json.dump({"argv": sys.argv[1:], "name": __name__, "env": dict(os.environ),
               "session": os.getsid(0), "pid": os.getpid(),
               "stdin": os.readlink("/proc/self/fd/0")}, file)
print("printed", flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
raise SystemExit(int(sys.argv[2]))
"""
SERVER_ARGV = [sys.executable, "-m", "server"]
READS_AT_IMPORT = "import os\nos.environ.get('READ')\n'ASKED' in os.environ\n"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "reads.py").write_text(READS_AT_IMPORT)
    report = str(tmp_path / "report.json")
    return {"PYTHONPATH": str(tmp_path), "REPORT": report, "GONE": "1", "READ": "1"}


@pytest.fixture
def mother(environ: dict[str, str]) -> Iterator[Zygote]:
    mother = Zygote(sys.executable, ["json", "reads"], environ)
    assert mother.works
    yield mother
    mother._process.kill()
    mother._process.wait(10)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("$ command\n")
    return path


def ended(server: Forked, timeout_s: float = 10.0) -> int | None:
    deadline = time.monotonic() + timeout_s
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return server.poll()


def test_a_fork_is_like_a_program_of_its_own(
    mother: Zygote, environ: dict[str, str], log: Path
) -> None:
    import json

    wanted = {**environ, "NEW": "2"}
    del wanted["GONE"]
    server = mother.fork([*SERVER_ARGV, "end", "5"], wanted, log)
    assert server is not None
    assert ended(server) == 5
    told = json.loads(Path(environ["REPORT"]).read_text())
    assert told["argv"] == ["end", "5"] and told["name"] == "__main__"
    assert told["session"] == told["pid"] == server.pid
    assert told["stdin"] == "/dev/null"
    assert told["env"]["NEW"] == "2" and "GONE" not in told["env"]
    assert log.read_text() == "$ command\nprinted\n"


@pytest.mark.parametrize("name", ["READ", "ASKED", "PYTHONPATH", "OMP_NUM_THREADS"])
def test_what_was_read_already_is_not_changed_in_a_fork(
    mother: Zygote, environ: dict[str, str], log: Path, name: str
) -> None:
    assert (
        mother.fork([*SERVER_ARGV, "end", "0"], {**environ, name: "other"}, log) is None
    )
    assert name in log.read_text()


def test_a_fork_can_be_ended(
    mother: Zygote, environ: dict[str, str], log: Path
) -> None:
    server = mother.fork([*SERVER_ARGV, "wait"], environ, log)
    assert server is not None and server.poll() is None
    server.terminate()
    assert ended(server) == -signal.SIGTERM


def test_a_fork_outlives_its_zygote_and_its_end_is_noticed(
    mother: Zygote, environ: dict[str, str], log: Path
) -> None:
    server = mother.fork([*SERVER_ARGV, "wait"], environ, log)
    assert server is not None
    mother._process.kill()
    mother._process.wait(10)
    assert server.poll() is None
    assert mother.fork([*SERVER_ARGV, "end", "0"], environ, log) is None
    os.kill(server.pid, signal.SIGKILL)
    assert ended(server) == -signal.SIGKILL


def test_an_interrupted_request_does_not_affect_the_next(
    mother: Zygote, environ: dict[str, str], log: Path
) -> None:
    server = mother.fork([*SERVER_ARGV, "wait"], environ, log)
    assert server is not None
    mother._orders.write(b'{"id": -1, "pid": %d}\n' % server.pid)
    mother._orders.flush()
    other = mother.fork([*SERVER_ARGV, "end", "3"], environ, log)
    assert other is not None and other.pid != server.pid
    assert ended(other) == 3
    server.terminate()
    assert ended(server) == -signal.SIGTERM


def test_an_end_is_known_after_an_interrupted_question(
    mother: Zygote, environ: dict[str, str], log: Path
) -> None:
    server = mother.fork([*SERVER_ARGV, "end", "3"], environ, log)
    assert server is not None
    deadline = time.monotonic() + 10.0
    status = None  # of answers that the one who asks does not get
    while status is None and time.monotonic() < deadline:
        answer = mother.ask({"pid": server.pid})
        assert answer is not None
        status = answer["status"]
    assert server.poll() == 3
    assert mother.works


def test_a_zygote_that_cannot_import_is_not_used(environ: dict[str, str]) -> None:
    assert not Zygote(sys.executable, ["no_such_module"], environ).works


@pytest.mark.parametrize("argv", [["python", "server.py"], ["python", "-m", "json"]])
def test_other_programs_start_the_usual_way(argv: list[str]) -> None:
    assert zygote_for(argv) is None


def test_the_zygote_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_PD_ZYGOTE", "0")
    assert zygote_for([sys.executable, "-m", "sglang.launch_server"]) is None


def test_a_zygote_that_does_not_answer_is_given_up(
    mother: Zygote, environ: dict[str, str], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_pd.bed.zygote._ANSWER_TIMEOUT_S", 0.2)
    os.kill(mother._process.pid, signal.SIGSTOP)
    assert mother.fork([*SERVER_ARGV, "end", "0"], environ, log) is None
    assert not mother.works
