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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in _KINDS):
            item.add_marker(pytest.mark.unit)
