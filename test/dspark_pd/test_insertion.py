"""Our lines go in; every byte of the original stays, in its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_pd.planning.astgrep import Match, Search, scan
from dspark_pd.planning.insertion import (
    Edit,
    NotAnInsertion,
    edits_of,
    normalise,
    splice,
)

pytestmark = pytest.mark.unit

TEXT = st.text(alphabet="ab é#\n\t", max_size=40)
LINES = st.text(alphabet="xyz \n", min_size=1, max_size=10)


@st.composite
def edited(draw: st.DrawFn) -> tuple[bytes, bytes, list[Edit]]:
    """Return a file, its LF form and insertions at whole characters of that form."""
    text = draw(TEXT)
    ends = draw(st.sampled_from(["\n", "\r\n"]))
    places = st.integers(0, len(text))
    edits = []
    for place, added in draw(st.lists(st.tuples(places, LINES), max_size=5)):
        offset = len(text[:place].encode())
        edits.append(Edit(offset, added, "a.call-b"))
    return text.replace("\n", ends).encode(), text.encode(), edits


@given(edited())
def test_only_the_added_text_is_added(case: tuple[bytes, bytes, list[Edit]]) -> None:
    data, plain, edits = case
    lf, carriage_returns = normalise(data)
    assert lf == plain
    result = splice(data, edits, carriage_returns)
    line_end = "\r\n" if carriage_returns else "\n"
    added = sum(len(edit.text.replace("\n", line_end).encode()) for edit in edits)
    assert len(result) == len(data) + added
    _assert_subsequence(data, result)


def _assert_subsequence(part: bytes, whole: bytes) -> None:
    rest = iter(whole)
    assert all(byte in rest for byte in part)


@given(st.lists(st.sampled_from([b"a\n", b"b\r\n", b"\n", b"\r\n", b"c"]), max_size=8))
def test_mixed_line_ends_come_back(lines: list[bytes]) -> None:
    data = b"".join(lines)
    plain, carriage_returns = normalise(data)
    assert b"\r\n" not in plain
    assert splice(data, [], carriage_returns) == data


def _match(source: str, old: str, new: str) -> Match:
    start = source.encode().index(old.encode())
    return Match("a.call-b", start, start + len(old.encode()), 1, new)


def insert(source: str, old: str, new: str) -> str:
    data = source.encode()
    edits = edits_of(_match(source, old, new), data)
    return splice(data, edits, []).decode()


def test_before_and_after() -> None:
    source = "def f():\n    work()\n"
    assert (
        insert(source, "work()", "ours()\n    work()\n    more()")
        == "def f():\n    ours()\n    work()\n    more()\n"
    )


def test_a_comment_stays_with_its_statement() -> None:
    source = "work()  # why\nrest()\n"
    assert insert(source, "work()", "work()\nours()") == (
        "work()  # why\nours()\nrest()\n"
    )


def test_a_second_statement_on_the_line_is_not_cut_off() -> None:
    source = "work(); rest()\n"
    assert insert(source, "work()", "work()\nours()") == "work()\nours(); rest()\n"


def test_inside_an_expression() -> None:
    source = "call(é, b)\n"
    assert insert(source, "call(é, b)", "call(é, b, ours)") == "call(é, b, ours)\n"


def test_before_and_inside_at_once() -> None:
    old = "if not a.b(c):\n        stop(1)"
    new = "asked = ask()\n    if not a.b(c) and not asked:\n        stop(1)"
    assert insert(f"def f():\n    {old}\n", old, new) == f"def f():\n    {new}\n"


def test_an_insertion_is_found_as_one_piece() -> None:
    match = _match("if not a(1):", "not a(1)", "not a(1) and not (b or c(2))")
    (edit,) = edits_of(match, b"if not a(1):")
    assert (edit.at, edit.text) == (11, " and not (b or c(2))")


def test_indentation_inside_a_string_is_kept() -> None:
    old = 'work("""a\n b""")'
    new = 'ours()\n    work("""a\n     b""")'
    assert insert(f"if x:\n    {old}\n", old, new) == f"if x:\n    ours()\n    {old}\n"


def test_a_change_of_upstream_is_not_an_insertion() -> None:
    source = "work(a)\n"
    with pytest.raises(NotAnInsertion, match=r"work\(a\) -> work\(b\)"):
        insert(source, "work(a)", "work(b)")


def test_insertions_at_one_place_keep_their_order() -> None:
    edits = [Edit(1, "first", "a.call-b"), Edit(1, "second", "a.call-c")]
    assert splice(b"()", edits, []) == b"(firstsecond)"


def test_ast_grep_counts_and_indents_as_assumed() -> None:
    """The facts about the pinned ast-grep that the tool rests on."""
    rule = '{"id": "a.b-c", "language": "python", "rule": {"pattern": "f()"}, '
    rule += '"fix": "ours()\\nf()"}'
    source = "if é:\n    f()\nf()\n".encode()
    found = scan([Search("y.py", b"g()\n", (rule,)), Search("x.py", source, (rule,))])
    assert found["y.py"] == []
    first, second = found["x.py"]
    assert (first.start, first.end, first.line) == (11, 14, 2)
    assert first.replacement == "ours()\n    f()"
    assert second.replacement == "ours()\nf()"


@pytest.mark.parametrize("place", ["before", "after"])
def test_empty_lines_get_no_indentation(place: str) -> None:
    source = "def f():\n    if a:\n        b()\n"
    ours = "        x()\n        \n        y()"
    new = f"{ours}\n        b()" if place == "before" else f"b()\n{ours}"
    match = _match(source, "b()", new.lstrip() if place == "before" else new)
    edits = edits_of(match, source.encode())
    result = splice(source.encode(), edits, []).decode()
    assert "x()\n\n        y()" in result
    assert not [line for line in result.splitlines() if line and not line.strip()]
    compile(result, "f", "exec")
