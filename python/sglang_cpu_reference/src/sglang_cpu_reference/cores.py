"""One core for all ranks of an engine.

Ranks talk through Gloo, which has a thread for each of an engine's many groups. Such a
thread that finds its connection locked by another asks again at once; where the lock's
holder waits for a core, dozens of them keep it waiting. Two ranks a stage and two stages
on two cores spent up to 150 s on what takes 2, and the machine stood still meanwhile.
Threads that share one core find the lock free: its holder was not interrupted.
"""

from __future__ import annotations

import os


def share_one_core() -> None:
    """Bind this thread, and what it starts, to a core chosen by process id."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
