"""Marks in sources: what an export leaves out, and that nothing else changes."""

from __future__ import annotations

import textwrap

import pytest
from packaging.version import Version

from dspark_pd.patchset.marks import resolve

pytestmark = pytest.mark.unit


def resolved(text: str, release: str = "1.1.0", *commits: str) -> str:
    source = textwrap.dedent(text).encode()
    return resolve(source, Version(release), commits).decode()


SOURCE = """\
    import os

    # export: from later
    LATER = (
        1,
        2,
    )


    # export: only <1.1.0
    @cache
    def old(a):
        return os


    def f(
        a,
        # export: from later
        b=1,
    ):
        x = [
            1,
            # export: from later
            g(
                2,
            ),
        ]
        # export: from later
        if x:
            return 1
        return {
            "one": 1,
            # export: from later
            "two": (
                2,
            ),
        }
    """
PLAIN = """\
    import os



    def f(
        a,
    ):
        x = [
            1,
        ]
        return {
            "one": 1,
        }
    """


def test_the_marked_part_is_left_out_over_all_its_lines() -> None:
    found = resolved(SOURCE)
    assert "\n".join(filter(None, found.split("\n"))) == "\n".join(
        filter(None, textwrap.dedent(PLAIN).split("\n"))
    )


def test_what_holds_stays_without_its_mark() -> None:
    found = resolved(SOURCE, "1.0.0", "later")
    kept = [
        line for line in textwrap.dedent(SOURCE).split("\n") if "# export" not in line
    ]
    assert found == "\n".join(kept)


def test_a_line_of_a_text_is_left_out_alone() -> None:
    text = """\
        f(
            # export: from later
            "one, "
            # export: from later
            f"two {x}, "
            "three",
        )
        """
    assert resolved(text) == 'f(\n    "three",\n)\n'
    assert resolved(text, "1.1.0", "later").count("\n") == 5


def test_two_marks_on_one_line_both_count() -> None:
    text = "# export: from later\n# export: only <1.1.0\nx = 1\ny = 2\n"
    assert resolved(text, "1.0.0", "later") == "x = 1\ny = 2\n"
    for release, commits in (("1.1.0", ["later"]), ("1.0.0", [])):
        assert resolved(text, release, *commits) == "y = 2\n"


def test_marks_in_texts_are_none() -> None:
    text = 'x = """\n# export: from later\n"""\n'
    assert resolved(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "# export: sometimes\nx = 1\n",
        "x = 1  # export: from later\n",
        "# export: only soon\nx = 1\n",
        "if x:\n    # export: from later\n    y = 1\n",
        'f(\n    "one, "\n    # export: from later\n    "two",\n)\n',
    ],
)
def test_a_mark_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        resolved(text)
