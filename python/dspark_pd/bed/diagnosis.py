"""From the log of a server that failed to a likely cause and a next step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_pd.bed.errors import BedError

if TYPE_CHECKING:
    from dspark_pd.bed.process import Process

_TAIL_LINES = 30
_SIGKILL = -9
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception): .{1,200})", re.MULTILINE)


@dataclass(frozen=True)
class Cause:
    """`pattern` in a log means `cause`; `next_step` is what to do about it."""

    pattern: str
    cause: str
    next_step: str


# First match wins, so the specific ones come first.
_CAUSES = (
    Cause(
        r"SGLANG_PLATFORM=.* not found in discovered",
        "the CPU reference platform is not installed in this environment",
        "pip install -e python/sglang_cpu_reference",
    ),
    Cause(
        r"DSpark speculative decoding only supports CUDA",
        "the patch set is not applied to the SGLang that ran",
        "dspark-pd status, then dspark-pd apply",
    ),
    Cause(
        r"address already in use|Port is already in use|Errno 98",
        "another program took a port before the engine could",
        "run again; other ports are chosen",
    ),
    Cause(
        r"No module named '?nixl|NIXL.*(not installed|not available)",
        "the NIXL wheel is missing",
        "pip install --no-deps -r requirements/engine-0.5.23.txt",
    ),
    Cause(
        r"Please install mooncake",
        "Mooncake's wheel is missing, or a library of the system that it needs",
        "pip install --no-deps -r requirements/engine-0.5.23.txt, or install rdma-core",
    ),
    Cause(
        r"No module named '?sglang_router",
        "the router wheel is missing",
        "pip install --no-deps -r requirements/engine-0.5.23.txt",
    ),
    Cause(
        r"ModuleNotFoundError: No module named '?(?P<module>[\w.]+)",
        "a Python package is missing",
        "pip install --no-deps -r requirements/engine-0.5.23.txt",
    ),
    Cause(
        r"No host memory is left for HiCache|Not enough host memory",
        "SGLang keeps 10 GiB free beside its host pools, and this machine has less",
        "stop other programs, or start without HiCache",
    ),
    Cause(
        r"Not enough memory|out of memory|MemoryError|Cannot allocate memory",
        "too little memory",
        "stop other programs, or start fewer engines at once",
    ),
    Cause(
        r"(config\.json|is not a local folder|Unrecognized model|OSError: .*tokenizer)",
        "the model path does not hold a usable checkpoint",
        "check --model and --draft",
    ),
)


def failure(server: Process, what: str) -> BedError:
    """The error for a server that failed; `what` completes "NAME ..."."""
    status = server.poll()
    text = server.log_text()
    cause, next_step = explain(text, status)
    return BedError(
        f"{server.name} {what}",
        expected="a running server that answers /health with 200",
        found="it still runs" if status is None else f"exit status {status}",
        cause=cause,
        next_step=next_step or f"read {server.log}",
        log_tail=telling_tail(text),
    )


def explain(log: str, status: int | None) -> tuple[str, str]:
    """Likely cause and next step; both empty when the log holds nothing we know."""
    for known in _CAUSES:
        match = re.search(known.pattern, log, re.IGNORECASE)
        if match:
            module = match.groupdict().get("module")
            return known.cause + (f": {module}" if module else ""), known.next_step
    raised = _RAISED.findall(log)
    if raised:
        return f"it raised {raised[-1]}", ""
    if status == _SIGKILL and "kill_process_tree" not in log:
        return (
            "killed from outside, most often by the kernel for lack of memory",
            "free memory (see `free -g`) and run again",
        )
    return "", ""


def telling_tail(log: str, lines: int = _TAIL_LINES) -> str:
    """The end of the log, or the last traceback when that ended earlier."""
    rows = log.splitlines()
    starts = [i for i, row in enumerate(rows) if "Traceback (most recent" in row]
    if not starts or starts[-1] >= len(rows) - lines:
        return "\n".join(rows[-lines:])
    return "\n".join([*rows[starts[-1] :][:lines], "...", *rows[-5:]])
