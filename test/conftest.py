"""Marks: a test that says nothing about itself is a unit test.

Unit tests of overlay modules follow SGLang's own form and carry no pytest marks.
"""

from __future__ import annotations

from typing import Any

import pytest

_KINDS = ("unit", "e2e", "release")
_ENGINES = "test/registered/disaggregation/"


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here and not beside test_releases.py: only this file is read before options are.
    text = "write the golden files of test_releases.py anew"
    parser.addoption("--update-goldens", action="store_true", help=text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in _KINDS):
            item.add_marker(pytest.mark.unit)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist one process has all engines, and a module keeps its process.

    The marker xdist_group would say the same, but 3.8 does not reach pytest 9.2 with it.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "e2e" if file.startswith(_ENGINES) else file

    return Scheduling(config, log)
