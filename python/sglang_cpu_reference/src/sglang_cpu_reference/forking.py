"""Engine processes that start by ``fork``.

SGLang starts its schedulers and its detokenizer by ``spawn``, because a CUDA context
does not survive a fork; each of them then imports everything the launching process
has imported already, some ten seconds of a core each. There is no such context here.
At the time of the fork the launching process has neither an event loop nor a socket
nor a transport; those are made afterwards, in the process that uses them.

``SGLANG_CPU_REFERENCE_FORK=0`` brings ``spawn`` back.
"""

from __future__ import annotations

import multiprocessing
import os

FORK_ENV = "SGLANG_CPU_REFERENCE_FORK"


def start_by_fork() -> None:
    """Let processes start by fork, unless the user says otherwise."""
    if os.environ.get(FORK_ENV) != "0":
        multiprocessing.set_start_method("fork", force=True)
