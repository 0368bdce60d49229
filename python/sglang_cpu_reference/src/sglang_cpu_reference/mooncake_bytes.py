"""Mooncake's transfer engine with a count of the bytes it moved.

SGLang moves KV and metadata by the two calls below, which return when the peer has
the bytes: 0, or a negative number after a failure, which counts nothing. When
``SGLANG_CPU_REFERENCE_STATS_DIR`` names a directory, each transfer that went well is
added to ``transfers-<pid>.json`` there.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.engine import TransferEngine

from sglang_cpu_reference.transfer_stats import asked_for


class CountingEngine(TransferEngine):
    """``TransferEngine`` that writes down what it has moved."""

    def __init__(self) -> None:
        super().__init__()
        self._stats = asked_for()

    def transfer_sync_write(
        self, target: str, source: int, destination: int, length: int
    ) -> int:
        status = super().transfer_sync_write(target, source, destination, length)
        self._note(status, length)
        return status

    def batch_transfer_sync_write(
        self,
        target: str,
        sources: Sequence[int],
        destinations: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        status = super().batch_transfer_sync_write(
            target, sources, destinations, lengths
        )
        self._note(status, sum(lengths))
        return status

    def _note(self, status: int, moved: int) -> None:
        if self._stats is not None and status == 0:
            self._stats.add(int(moved))
