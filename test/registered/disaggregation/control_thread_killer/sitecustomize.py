"""Ends a control thread or the scheduler of a running engine, to see what happens then.

Python imports a module of this name in every process whose PYTHONPATH holds this
folder. A file in ``CONTROL_THREAD_KILLER_DIR`` names the function that a thread runs;
the process that has such a thread removes the file and makes the thread raise
``SystemExit``, which no handler for errors catches. A thread that waits for a message
raises when the next one comes. If the file's name begins with `RAISE`, that process's
main thread, its scheduler, raises ``RuntimeError`` instead.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

_POLL_S = 0.1
RAISE = "raise-in-scheduler-of-"


def _watch(folder: str) -> None:
    while True:
        time.sleep(_POLL_S)
        for name in os.listdir(folder):
            function, error = name.removeprefix(RAISE), SystemExit
            # The standard library names a thread by the function it runs.
            doomed = [t for t in threading.enumerate() if f"({function}" in t.name]
            if doomed:
                os.unlink(os.path.join(folder, name))
                if name != function:
                    doomed, error = [threading.main_thread()], RuntimeError
            for thread in doomed:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(error)
                )


def _start() -> None:
    threading.Thread(target=_watch, args=(_folder,), daemon=True).start()


_folder = os.environ.get("CONTROL_THREAD_KILLER_DIR")
if _folder:
    _start()
    # A forked process has the modules of its parent, but not its threads.
    os.register_at_fork(after_in_child=_start)
