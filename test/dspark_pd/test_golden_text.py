"""Golden files say our lines and their place, and nothing of the file around them."""

from __future__ import annotations

import pytest

from dspark_pd.planning.insertion import Edit
from dspark_pd.planning.plan import PlannedFile
from golden_text import render

pytestmark = pytest.mark.unit

SOURCE = """\
TOP = 1


class Outer:
    @property
    def first(self):
        secret = 1
        return secret

    def second(self):
        if self.first:
            return call(1)
"""


def rendered(anchor: str, text: str, after: bool = False) -> str:
    at = SOURCE.index(anchor) + (len(anchor) if after else 0)
    edit = Edit(at, text, "a.call-b")
    file = PlannedFile("x.py", "hunk", SOURCE.encode(), b"", ("a.call-b",), (edit,))
    return render(file)


def test_lines_before_a_statement() -> None:
    text = "if ours():\n            return\n        "
    assert rendered("return secret", text) == (
        "a.call-b  Outer.first +2\n    | if ours():\n    |     return\n"
    )


def test_lines_after_a_statement() -> None:
    text = "\n        ours()\n        more()"
    assert rendered("secret = 1", text, after=True) == (
        "a.call-b  Outer.first +2\n    | ours()\n    | more()\n"
    )


def test_text_inside_a_line() -> None:
    assert rendered("call(1", ", ours", after=True) == (
        "a.call-b  Outer.second +2 inside the line\n    | , ours\n"
    )


def test_a_method_before_another_one_is_in_the_class() -> None:
    text = "def ours(self):\n        pass\n\n    "
    assert rendered("@property", text).startswith("a.call-b  Outer +1\n")
    assert rendered("def second", text).startswith("a.call-b  Outer +6\n")


def test_the_top_of_a_file() -> None:
    assert (
        rendered("TOP = 1", "OURS = 2\n") == "a.call-b  <module> +0\n    | OURS = 2\n"
    )
