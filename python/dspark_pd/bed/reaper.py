"""Kills process groups once the process that registered them is gone.

Started by :mod:`dspark_pd.bed.process` in a session of its own. It reads ``+PGID`` and
``-PGID`` lines from standard input. End of file means that the owner ended, whatever
the way (``kill -9`` included), and every group that is still registered is killed.
This file runs as a script, without site packages, so it imports the standard library
alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_GRACE_S = 1.0


def _signal_all(groups: set[int], signum: int) -> None:
    for pgid in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, signum)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        pgid = int(line[1:])
        if line[0] == "+":
            groups.add(pgid)
        else:
            groups.discard(pgid)
    if groups:
        _signal_all(groups, signal.SIGTERM)
        time.sleep(_GRACE_S)
        _signal_all(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
