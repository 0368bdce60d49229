"""The platform class: every answer SGLang's platform hooks ask for.

One instance per process, made by SGLang on its first use of
``current_platform``. Heavy modules are imported inside the hook that needs them,
so that a process which only reads the device identity stays light.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang_cpu_reference.environment import thread_binding
from sglang_cpu_reference.older_hooks import OlderPlatformHooks

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "cpu_reference"
SPECULATIVE_ALGORITHMS = frozenset({"DSPARK", "DFLASH"})
NOTICE = (
    "cpu_reference: pure PyTorch on a CPU, a correctness reference. "
    "Not for speed: do not measure throughput or latency on it."
)

# What SGLang picks for a CPU before it asks the platform; neither can verify.
_IN_TREE_CPU_BACKENDS = (None, "intel_amx", "torch_native")

# Sizes that keep a small model's engine small; a flag of the user's wins.
_SIZE_DEFAULTS = {"max_total_tokens": 32768, "max_running_requests": 16}


class CpuReferencePlatform(OlderPlatformHooks, CpuDeviceMixin, SRTPlatform):
    """A CPU that runs SGLang's device-neutral paths in PyTorch."""

    # Out of tree: SGLang asks the hooks below instead of guessing from "cpu".
    _enum = PlatformEnum.OOT
    device_name = "cpu_reference"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill what the user left open; runs once, in the launching process."""
        logger.warning(NOTICE)
        _register_attention_choices()
        for name, value in _SIZE_DEFAULTS.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)
        if server_args.attention_backend in _IN_TREE_CPU_BACKENDS:
            server_args.attention_backend = ATTENTION_BACKEND
        server_args.sleep_on_idle = True
        ranks = server_args.dp_size * server_args.tp_size * server_args.pp_size
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", thread_binding(ranks))

    def init_backend(self) -> None:
        """Register the attention backend; runs in every model worker."""
        from sglang.srt.layers.attention.attention_registry import (
            register_attention_backend,
        )

        _register_attention_choices()
        register_attention_backend(ATTENTION_BACKEND)(_create_attention_backend)
        if not hasattr(_choices_module(), "DRAFT_ATTENTION_BACKEND_CHOICES"):
            # Before 0.5.19 a draft on an unlisted backend falls back to this name.
            register_attention_backend("flashinfer")(_create_attention_backend)

    def get_device(self, device_id: int | None = 0) -> str:
        """The device as a string, which is how SGLang's arguments carry it."""
        del device_id
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        del algorithm
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() in SPECULATIVE_ALGORITHMS

    def supports_speculative_draft_attention_backend(
        self, algorithm: str, backend: str
    ) -> bool:
        return (
            self.supports_speculative_algorithm(algorithm)
            and backend == ATTENTION_BACKEND
        )

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_cpu_reference.token_slots import speculative_cache_locs

        return speculative_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_cpu_reference.kv_pool import ReferenceMHATokenToKVPool

        return ReferenceMHATokenToKVPool

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        del local_rank
        return torch.device("cpu")

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        del mode
        return "eager"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        del device
        return False

    def empty_cache(self) -> None:
        """Nothing to release: host tensors are freed by reference count."""


def _register_attention_choices() -> None:
    """Extend SGLang's lists of backend names, where the release has them."""
    lists = (
        ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
        ("DRAFT_ATTENTION_BACKEND_CHOICES", "add_draft_attention_backend_choices"),
    )
    choices = _choices_module()
    for names, adder in lists:
        if ATTENTION_BACKEND not in getattr(choices, names, (ATTENTION_BACKEND,)):
            getattr(choices, adder)([ATTENTION_BACKEND])


def _choices_module() -> Any:
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:
        from sglang.srt import server_args as choices
    return choices


def _create_attention_backend(runner: Any) -> Any:
    from sglang_cpu_reference.attention_backend import ReferenceAttentionBackend

    return ReferenceAttentionBackend(runner)
