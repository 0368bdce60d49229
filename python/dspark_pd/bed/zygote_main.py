"""Imports SGLang once and forks a server from it for each order.

Started by :mod:`dspark_pd.bed.zygote` with the engines' interpreter. Orders come as
JSON lines on standard input and are answered in turn; `id` comes back as it was:

    {"module": M, "argv": [..], "environ": {..}, "log": FILE}  ->  {"pid": N}
    {"pid": N}                            ->  {"status": null, or as Popen.poll has it}

A fork behaves as ``python -m M ARGV...`` would: a session of its own, its output
appended to FILE, its own environment. SGLang reads part of the environment while it is
imported, and that part is noted: an order that differs there is answered with
``{"pid": null, "read": [NAME, ..]}``, and has to start the usual way. End of input ends
this process; the servers go on. This file runs as a script: standard library alone,
until the preload.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any, TextIO

# Read by the interpreter or by C code while it loads, where nobody sees it.
_READ_AT_LOAD = ("PYTHON", "LD_", "OMP_", "MKL_", "MALLOC_")

_environment_class: Any = type(os.environ)
_seen: set[str] = set()
# The system tells a status once, and the answer that held it may have been interrupted.
_statuses: dict[int, int] = {}


class _Noting(_environment_class):  # type: ignore[misc]
    """``os.environ`` that remembers which names were looked up."""

    def __getitem__(self, name: str) -> str:
        _seen.add(name)
        value: str = super().__getitem__(name)
        return value


def preload(modules: list[str]) -> None:
    """Import what the servers will need, noting what they read from the environment."""
    os.environ.__class__ = _Noting
    for name in modules:
        importlib.import_module(name)
    os.environ.__class__ = _environment_class
    gc.collect()
    gc.freeze()


def changed(wanted: dict[str, str], at_start: dict[str, str]) -> set[str]:
    """Names of the variables that a server wants otherwise than the zygote had them."""
    names = {*wanted, *at_start}
    return {name for name in names if wanted.get(name) != at_start.get(name)}


def too_late(names: set[str]) -> list[str]:
    """Those that were read already, so that a fork would not notice the change."""
    return sorted(
        name for name in names if name in _seen or name.startswith(_READ_AT_LOAD)
    )


def become_server(order: dict[str, Any], names: set[str]) -> None:
    """In the fork: a session, an environment and an output of its own."""
    os.setsid()
    for name in names:
        if name in order["environ"]:
            os.environ[name] = order["environ"][name]
        else:
            os.environ.pop(name, None)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    sys.argv[1:] = order["argv"]


def status_of(pid: int) -> int | None:
    """Exit status of a server, negative for a signal; None while it runs."""
    if pid not in _statuses:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _statuses[pid] = os.waitstatus_to_exitcode(status)
    return _statuses[pid]


def serve(at_start: dict[str, str], orders: TextIO, answers: TextIO) -> str | None:
    """Answer orders until they end; in a fork, the name of the module to run."""
    for line in orders:
        order: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {"id": order["id"]}
        if "module" in order:
            names = changed(order["environ"], at_start)
            answer["read"] = too_late(names)
            answer["pid"] = None if answer["read"] else os.fork()
            if answer["pid"] == 0:
                answers.close()
                become_server(order, names)
                return str(order["module"])
        else:
            answer["status"] = status_of(order["pid"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return None


def main() -> None:
    at_start = dict(os.environ)
    # Nothing that is imported may write among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload(sys.argv[1:])
    answers.write("ready\n")
    answers.flush()
    module = serve(at_start, sys.stdin, answers)
    if module is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
