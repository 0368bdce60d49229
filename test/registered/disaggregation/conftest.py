"""Engines shared by the end-to-end tests of one session.

Engines are forked from a process that has imported SGLang (`dspark_pd.bed.zygote`) and
are ready after some four seconds; an engine with a PYTHONPATH of its own imports SGLang
itself and takes twelve. Tests share `references` (unified serving, stopped once its
answers are known) and `native_pair` (overlap on, one rank per engine); other engines are
fixtures of the module that needs them. Each test leaves the engines healthy; the check at
the end of the session names one that is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pd_parity import Pair, native_specs, route
from pd_prompts import References

from dspark_pd.bed import Bed, Engine, EngineSpec


class MooncakeBed(Bed):
    """A bed whose pairs use Mooncake, unless their flags say otherwise."""

    def start(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        return super().start([replace(s, transfer_backend="mooncake") for s in specs])


@pytest.fixture(scope="session")
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """Where every engine of the session runs; logs are kept when a test failed."""
    kind = Bed
    if request.config.getoption("--transfer-backend") == "mooncake":
        request.getfixturevalue("mooncake")
        kind = MooncakeBed
    with kind("e2e") as bed:
        yield bed
        bed.keep_logs = bool(request.session.testsfailed)
        bed.assert_healthy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """A failed test shows how the log of each engine ends: under CI no file is left."""
    report = yield
    bed = getattr(item, "funcargs", {}).get("bed")
    if report.failed and bed is not None:
        for server in bed.servers:
            if isinstance(server, Engine):
                report.sections.append((f"log of {server.name}", server.log_tail(12)))
    return report


@pytest.fixture(scope="session")
def references(bed: Bed) -> References:
    """Answers of unified serving, computed when first asked for."""
    return References(bed)


@pytest.fixture(scope="session")
def native_pair(bed: Bed, references: References) -> Pair:
    """DSPARK on both engines, overlap scheduling on.

    Its decode engine may also serve a prefill engine without a draft: the test that
    shows what goes wrong then needs it.
    """
    references.get("short")
    prefill, decode = native_specs(
        "native",
        env={"SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "1"},
        # One test reads batch sizes from the log.
        args={"decode-log-interval": 1},
    )
    return route(bed, *bed.start([prefill, decode]))
