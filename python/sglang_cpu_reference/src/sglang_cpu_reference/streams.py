"""Stream calls that a CPU has no use for.

A CPU runs SGLang's streams in program order, so ownership of a tensor by a stream
means nothing and every event has already happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Page indices are on the host already: no copy whose end a CUDA event would tell.
INDICES_ARE_COPIED_ASIDE = False


def record_stream(original: Callable[..., None], tensor: torch.Tensor, stream: Any):
    """Around ``Tensor.record_stream``, which refuses host tensors."""
    if tensor.device.type != "cpu":
        original(tensor, stream)
