"""NIXL over host memory, with a count of the bytes it moved.

SGLang declares its KV buffers as VRAM; on this platform they are host memory, so
every VRAM descriptor becomes DRAM. When ``SGLANG_CPU_REFERENCE_STATS_DIR`` names
a directory, NIXL's own transfer telemetry is switched on and each completed
transfer is added to ``transfers-<pid>.json`` there.
"""

from __future__ import annotations

from typing import Any

from sglang_cpu_reference.nixl_build import loaded_module
from sglang_cpu_reference.transfer_stats import asked_for

_api = loaded_module("_api")


def host_memory_kind(mem_type: str | None) -> str | None:
    """The kind NIXL is told: DRAM for VRAM (and its old name), else unchanged."""
    return "DRAM" if mem_type in ("VRAM", "cuda") else mem_type


class HostMemoryAgent(_api.nixl_agent):
    """``nixl_agent`` for processes whose device memory is host memory."""

    def __init__(
        self,
        agent_name: str,
        nixl_conf: Any = None,
        instantiate_all: bool = False,
    ) -> None:
        self._stats = asked_for()
        # Posted and not yet counted: a transfer is asked for its state many times.
        self._open: set[int] = set()
        if self._stats is not None:
            nixl_conf = nixl_conf or _api.nixl_agent_config()
            nixl_conf.capture_telemetry = True
        super().__init__(agent_name, nixl_conf, instantiate_all)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        return super().get_xfer_descs(descs, host_memory_kind(mem_type))

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        return super().get_reg_descs(descs, host_memory_kind(mem_type))

    def prep_xfer_dlist(
        self,
        agent_name: str,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: list[str] = [],  # noqa: B006  (NIXL's own signature)
    ) -> Any:
        return super().prep_xfer_dlist(
            agent_name, xfer_list, host_memory_kind(mem_type), backends
        )

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        status = super().transfer(handle, notif_msg)
        if self._stats is not None:
            self._open.add(id(handle))
            self._note(handle, status)
        return status

    def check_xfer_state(self, handle: Any) -> str:
        status = super().check_xfer_state(handle)
        if self._stats is not None:
            self._note(handle, status)
        return status

    def _note(self, handle: Any, status: str) -> None:
        if status == "DONE" and id(handle) in self._open:
            self._open.discard(id(handle))
            self._stats.add(int(self.get_xfer_telemetry(handle).totalBytes))
