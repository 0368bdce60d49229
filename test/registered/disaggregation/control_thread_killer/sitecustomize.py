"""Ends a control thread of a running engine, for tests of what happens then.

Python imports a module of this name in every process whose PYTHONPATH holds this
folder. A file in ``CONTROL_THREAD_KILLER_DIR`` names the function that a thread runs;
the process that has such a thread removes the file and makes the thread raise
``SystemExit``, which no handler for errors catches. A thread that waits for a message
raises when the next one comes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

_POLL_S = 0.1


def _watch(folder: str) -> None:
    while True:
        time.sleep(_POLL_S)
        for name in os.listdir(folder):
            # The standard library names a thread by the function it runs.
            doomed = [t for t in threading.enumerate() if f"({name}" in t.name]
            if doomed:
                os.unlink(os.path.join(folder, name))
            for thread in doomed:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                )


def _start() -> None:
    threading.Thread(target=_watch, args=(_folder,), daemon=True).start()


_folder = os.environ.get("CONTROL_THREAD_KILLER_DIR")
if _folder:
    _start()
    # A forked process has the modules of its parent, but not its threads.
    os.register_at_fork(after_in_child=_start)
