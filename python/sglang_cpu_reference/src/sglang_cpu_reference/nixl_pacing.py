"""A NIXL agent whose progress thread rests between polls.

NIXL's Python configuration sets the delay to zero, which spins one core per
agent. On a machine with few cores that core is the other engine's.
"""

from __future__ import annotations

from sglang_cpu_reference.nixl_build import loaded_module

PROGRESS_DELAY_US = 1000


class PacedAgent(loaded_module("_bindings").nixlAgent):
    """``nixlAgent(name, config)`` with a progress delay of one millisecond."""

    def __init__(self, name, config) -> None:
        config.pthrDelay = PROGRESS_DELAY_US
        super().__init__(name, config)
