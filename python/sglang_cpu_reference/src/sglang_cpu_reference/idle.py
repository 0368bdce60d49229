"""A pause for schedulers that have nothing to run.

A fully idle scheduler sleeps in SGLang's own idle sleeper, which the platform
turns on. One that only waits (for a KV transfer, a bootstrap, a storage read)
is polled in a loop; on a shared CPU that loop starves the very process it is
waiting for.
"""

from __future__ import annotations

import time

REST_SECONDS = 0.001


def rest_after_idle_pass(result: object, scheduler: object) -> None:
    """Hook after ``Scheduler.on_idle``: give the core away for a moment."""
    del result, scheduler
    time.sleep(REST_SECONDS)
