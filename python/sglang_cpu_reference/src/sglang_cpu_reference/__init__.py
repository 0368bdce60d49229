"""An SGLang platform that runs the stock engine on a CPU, in PyTorch alone.

Life cycle: SGLang finds the entry point ``cpu_reference`` of the group
``sglang.srt.platforms`` in every process and calls :func:`activate` the first
time it needs to know its device. Unless ``SGLANG_PLATFORM=cpu_reference`` names
this platform, nothing happens. When it does, activation is cheap: it sets a few
environment defaults and arms the adaptations, which install themselves when the
module they concern is imported. No engine module is imported here.
"""

from __future__ import annotations

import os

PLATFORM_NAME = "cpu_reference"
_PLATFORM_CLASS = "sglang_cpu_reference.platform.CpuReferencePlatform"


def activate() -> str | None:
    """Arm the platform when it is named.

    Returns:
        The qualified name of the platform class, or None (inert) unless
        ``SGLANG_PLATFORM`` is ``cpu_reference``.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    from sglang_cpu_reference import adaptations, environment

    environment.apply()
    adaptations.arm()
    return _PLATFORM_CLASS
