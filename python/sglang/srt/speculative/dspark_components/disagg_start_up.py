"""Which speculative algorithms a decode engine can start with.

A decode engine continues requests that another engine prefilled, so its algorithm must
rebuild its draft input for them. One that does not would start, report health and fail at
its first request; it is refused while arguments are resolved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo


def refuse_without_handoff(
    algorithm: SpeculativeAlgorithm | CustomSpecAlgo | None, server_args: ServerArgs
) -> None:
    """Refuse at start-up a decode engine whose algorithm cannot take a handoff.

    Raises:
        ValueError: ``--disaggregation-mode decode`` with a speculative algorithm
            that rebuilds no draft input for a request prefilled elsewhere.
    """
    if algorithm is None or algorithm.is_none():
        return
    if server_args.disaggregation_mode != "decode" or takes_handoff(algorithm):
        return
    raise ValueError(
        f"--speculative-algorithm {algorithm.name} cannot run with "
        "--disaggregation-mode decode: this release does not rebuild its draft "
        "input for a request that another engine prefilled, so the first decode "
        "step would have none. Use DSPARK or an EAGLE algorithm on the decode "
        "engine, drop --speculative-algorithm there, or serve without "
        "--disaggregation-mode."
    )


def takes_handoff(algorithm: SpeculativeAlgorithm | CustomSpecAlgo) -> bool:
    """Whether the algorithm rebuilds its draft input after a handoff.

    A registered algorithm does if its class has a builder of its own.
    """
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    if isinstance(algorithm, CustomSpecAlgo):
        builder = type(algorithm).build_disagg_draft_input
        return builder is not CustomSpecAlgo.build_disagg_draft_input
    # export: only <0.5.20
    if algorithm.is_dflash() and not _builds_dflash_input():
        return False
    return algorithm.is_eagle() or algorithm.is_dspark() or algorithm.is_dflash()


# export: only <0.5.20
def _builds_dflash_input() -> bool:
    try:
        from sglang.srt.speculative.dflash_disaggregation import (  # noqa: F401
            build_dflash_disagg_draft_input,
        )
    except ImportError:
        return False
    return True
