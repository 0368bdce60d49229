"""The complete list of upstream code this platform adapts at run time.

Platform hooks and registries come first (``platform.py``); what stands here is
what no hook reaches. Life cycle: :func:`arm` is called once per process at
activation. Each adaptation waits until the module of its target is imported,
checks that the target exists with the parameters it was written for, hands it to
SGLang's own ``HookRegistry`` and checks that it took. A target that is missing or
has changed raises :class:`AdaptationError`: the process stops, it never runs half
adapted.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from dataclasses import dataclass
from typing import Any

from sglang_cpu_reference import post_import
from sglang_cpu_reference.nixl_build import NIXL_BUILDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adaptation:
    """One adapted target.

    Attributes:
        module: module that defines the target.
        name: dotted name of the target inside the module.
        kind: ``replace``, ``around``, ``before`` or ``after`` (HookRegistry).
        hook: ``package.module:function`` of this package.
        params: the target's parameter names; None for a class or a builtin.
        why: what goes wrong on a CPU without it.
        seam: the upstream extension point that would make it unnecessary.
    """

    module: str
    name: str
    kind: str
    hook: str
    params: tuple[str, ...] | None
    why: str
    seam: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


class AdaptationError(RuntimeError):
    """An adaptation does not fit the installed release."""


_PACKAGE = "sglang_cpu_reference"

TABLE: tuple[Adaptation, ...] = (
    Adaptation(
        module="sglang.srt.mem_cache.allocation",
        name="assign_req_to_token_pool_func",
        kind="replace",
        hook=f"{_PACKAGE}.token_slots:assign_req_to_token_pool",
        params=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        why="launches a Triton kernel although supports_triton is False",
        seam="the writer should follow capabilities.supports_triton",
    ),
    Adaptation(
        module="torch",
        name="Tensor.record_stream",
        kind="around",
        hook=f"{_PACKAGE}.streams:record_stream",
        params=None,
        why="the DSPARK and HiCache workers call it on every device",
        seam="a stream-ownership helper on the platform",
    ),
    Adaptation(
        module="sglang.srt.managers.scheduler",
        name="Scheduler.on_idle",
        kind="after",
        hook=f"{_PACKAGE}.idle:rest_after_idle_pass",
        params=("self",),
        why="a scheduler that waits for a transfer polls without a pause",
        seam="--sleep-on-idle covers fully idle schedulers only",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.base",
        name="HostKVCache.__init__",
        kind="before",
        hook=f"{_PACKAGE}.hicache:unpin",
        params=None,
        why="host pools ask for pinned memory by default",
        seam="the default should follow is_pin_memory_available",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.mha",
        name="MHATokenToKVPoolHost.load_to_device_per_layer",
        kind="replace",
        hook=f"{_PACKAGE}.hicache:load_to_device_per_layer",
        params=(
            "self",
            "device_pool",
            "host_indices",
            "device_indices",
            "layer_id",
            "io_backend",
            "is_draft",
        ),
        why="the copy kernels exist for CUDA, ROCm, XPU and NPU only",
        seam="get_kv_pool_cls has no counterpart for host pools",
    ),
    Adaptation(
        module="sglang.srt.mem_cache.pool_host.mha",
        name="MHATokenToKVPoolHost.backup_from_device_all_layer",
        kind="replace",
        hook=f"{_PACKAGE}.hicache:backup_from_device_all_layer",
        params=(
            "self",
            "device_pool",
            "host_indices",
            "device_indices",
            "io_backend",
        ),
        why="the copy kernels exist for CUDA, ROCm, XPU and NPU only",
        seam="get_kv_pool_cls has no counterpart for host pools",
    ),
    *(
        Adaptation(
            module=f"{build}._api",
            name="nixl_agent",
            kind="replace",
            hook=f"{_PACKAGE}.nixl_dram:HostMemoryAgent",
            params=None,
            why="KV buffers are declared VRAM; a CPU's pool is DRAM",
            seam="the pool's memory kind should come from the platform",
        )
        for build in NIXL_BUILDS
    ),
    *(
        Adaptation(
            module=f"{build}._bindings",
            name="nixlAgent",
            kind="replace",
            hook=f"{_PACKAGE}.nixl_pacing:PacedAgent",
            params=None,
            why="the progress thread spins a whole core per engine",
            seam="nixl_agent_config has no progress thread delay",
        )
        for build in NIXL_BUILDS
    ),
)


def arm() -> None:
    """Install every adaptation as soon as its module is imported."""
    for adaptation in TABLE:
        post_import.watch(adaptation.module, lambda entry=adaptation: install(entry))


def install(adaptation: Adaptation) -> None:
    """Verify and install one adaptation.

    Raises:
        AdaptationError: the target is missing, has other parameters, or the
            hook registry did not take the hook.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    original = resolve_target(adaptation)
    verify_parameters(adaptation, original)
    HookRegistry.register(
        adaptation.target,
        pkgutil.resolve_name(adaptation.hook),
        HookType(adaptation.kind),
    )
    HookRegistry.apply_hooks()
    if resolve_target(adaptation) is original:
        raise AdaptationError(_message(adaptation, "the hook to be applied", "it not"))
    logger.debug("Adapted %s: %s", adaptation.target, adaptation.why)


def resolve_target(adaptation: Adaptation) -> Any:
    """The object an adaptation names.

    Raises:
        AdaptationError: the module has no such name.
    """
    try:
        return pkgutil.resolve_name(f"{adaptation.module}:{adaptation.name}")
    except (AttributeError, ImportError) as error:
        raise AdaptationError(
            _message(adaptation, "the target to exist", repr(error))
        ) from error


def verify_parameters(adaptation: Adaptation, target: Any) -> None:
    """Compare a target's parameter names with those the hook was written for.

    Raises:
        AdaptationError: they differ.
    """
    if adaptation.params is None:
        return
    found = tuple(inspect.signature(target).parameters)
    if found != adaptation.params:
        raise AdaptationError(
            _message(adaptation, f"parameters {adaptation.params}", str(found))
        )


def _message(adaptation: Adaptation, expected: str, found: str) -> str:
    return (
        f"sglang-cpu-reference cannot adapt {adaptation.target}: expected "
        f"{expected}, found {found}. Likely cause: this SGLang or NIXL release is "
        f"newer or older than the plugin. Next: pip show sglang sglang-cpu-reference"
    )
