"""Marks, and what all tests share. A test that says nothing about itself is a unit test.

Unit tests of overlay modules follow SGLang's own form and carry no pytest marks.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

_KINDS = ("unit", "e2e", "release")
_ENGINES = "test/registered/disaggregation/test_disaggregation_dspark_"
_FAULTS = ("fault", "leg", "measure", "mismatch", "mooncake")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here and not beside test_releases.py: only this file is read before options are.
    text = "write the golden files of test_releases.py anew"
    parser.addoption("--update-goldens", action="store_true", help=text)
    text = "what the engines of the end-to-end tests move KV with"
    parser.addoption(
        "--transfer-backend", choices=("nixl", "mooncake"), default="nixl", help=text
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in _KINDS):
            item.add_marker(pytest.mark.unit)
    if hasattr(config, "workerinput"):  # of several processes; long modules go first
        items.sort(key=lambda item: not item.nodeid.startswith(_ENGINES))


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Mooncake loads; without it skip, or fail under ``CI=true``."""
    # Not above: tests of other releases load this file, and need no bed.
    from dspark_pd.bed.checks import check_backend
    from dspark_pd.bed.errors import BedError

    try:
        check_backend("mooncake")
    except BedError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(f"{error.summary}: {error.found}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist a module keeps its process, and two have all engines.

    Modules with engines share them, and the process that forks them: those of one group
    run in one process. The marker xdist_group would say the same, but 3.8 does not reach
    pytest 9.2 with it.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not file.startswith(_ENGINES):
                return file
            is_fault = file.removeprefix(_ENGINES).startswith(_FAULTS)
            return "engines that fail" if is_fault else "engines that agree"

    return Scheduling(config, log)
