"""Attention data parallelism: tokens of the ranks are gathered and scattered by copies.

SGLang has both for its own CPU engine, chosen by a flag of the process and not by the
platform. Before 0.5.19 it has neither, and attention DP does not run here.
"""

from __future__ import annotations

from typing import Any

import torch

# Read where a batch's token counts are sent to the device: page-locked unless a CPU.
IS_CPU = True


def copy_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: int,
    sz: int,
    offset_src: bool,
) -> None:
    """Copy ``sz`` rows, ``offset`` counted in ``src`` or in ``dst``; ``dim`` is 0.

    What goes beyond either tensor's end is left out, as the kernel does.
    """
    assert dim == 0, dim
    if offset_src:
        src = src[offset:]
    else:
        dst = dst[offset:]
    rows = min(int(sz), len(dst), len(src))
    dst[:rows].copy_(src[:rows])


def all_gather_into_tensor(
    self: Any, output: torch.Tensor, input: torch.Tensor
) -> None:
    """The group's own gather; as a custom op it has no kernel for a CPU's tensors."""
    self._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(self: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """The group's own reduce-scatter, for the same reason."""
    self._reduce_scatter_tensor(output, input)
