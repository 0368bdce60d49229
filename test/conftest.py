"""Marks: a test that says nothing about itself is a unit test.

Unit tests of overlay modules follow SGLang's own form and carry no pytest marks.
"""

from __future__ import annotations

import pytest

_KINDS = ("unit", "e2e", "release")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here and not beside test_releases.py: only this file is read before options are.
    text = "write the golden files of test_releases.py anew"
    parser.addoption("--update-goldens", action="store_true", help=text)


# First, before pytest-xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in _KINDS):
            item.add_marker(pytest.mark.unit)
        # One process has all engines, so that tests share them; a module keeps its own.
        is_e2e = item.get_closest_marker("e2e") is not None
        group = "e2e" if is_e2e else item.location[0]
        item.add_marker(pytest.mark.xdist_group(group))
