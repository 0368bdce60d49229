"""What each field of a hunk document may hold.

``wrong_fields`` walks two tables, one for the top level and one for ``metadata``. A table
maps a field to (required, what is wanted, test); a field that is in no table is
refused, because a mistyped name would otherwise be a field left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

KINDS: Final = ("wire", "seam", "gate", "fix")
MAX_MESSAGE_COLUMNS: Final = 80
MAX_NOTE_LINES: Final = 6
MAX_INSERTED_LINES: Final = 10

WrongField = tuple[str, str, object]
_Test = Callable[[Any], bool]
_Table = dict[str, tuple[bool, str, _Test]]

_ID = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9]*(-[a-z0-9]+)+(@\d+\.\d+\.\d+)?")
_URL = re.compile(r"https://github\.com/\S+")
_FORWARDED = re.compile(rf"no|not-needed: \S.*|{_URL.pattern}|merged:\d+\.\d+\.\d+")
_REVIEW = re.compile(r"https://\S+")
_DOTTED = re.compile(r"sglang(\.[A-Za-z_]\w*){2,}")
_TEST_ID = re.compile(r"test/[\w/]+\.py(::\w+){1,2}")
_SYMBOL = re.compile(r"[\w/]+\.py::\w+(\.\w+)*")


def wrong_fields(data: object, components: Iterable[str]) -> Iterator[WrongField]:
    """Yield (field, what is wanted, what is there) for each wrong field."""
    if not isinstance(data, dict):
        yield "document", "a mapping", type(data).__name__
        return
    yield from _walk(data, _TOP, "")
    metadata = data.get("metadata")
    if isinstance(metadata, dict):
        yield from _walk(metadata, _METADATA, "metadata.")
        component = metadata.get("component")
        if component is not None and str(component) not in components:
            wanted = f"one of {', '.join(components)}"
            yield "metadata.component", wanted, repr(component)


def _walk(data: dict[str, Any], table: _Table, prefix: str) -> Iterator[WrongField]:
    for key in data.keys() - table.keys():
        yield prefix + str(key), f"one of {', '.join(table)}", "a field nobody reads"
    for key, (required, wanted, fits) in table.items():
        if key not in data:
            if required:
                yield prefix + key, wanted, "nothing"
        elif not fits(data[key]):
            yield prefix + key, wanted, repr(data[key])


def _matches(pattern: re.Pattern[str]) -> _Test:
    return lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _message(value: Any) -> bool:
    return _text(value) and "\n" not in value and len(value) <= MAX_MESSAGE_COLUMNS


def _note(value: Any) -> bool:
    return _text(value) and len(value.strip().splitlines()) <= MAX_NOTE_LINES


def _ranges(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(SpecifierSet(value))
    except InvalidSpecifier:
        return False


DECIDABLE: Final = ("release", "symbol", "match")
"""Drop conditions that a program can decide; ``review`` names what a person reads."""
_DROP_TESTS: Final[dict[str, _Test]] = {
    "release": _ranges,
    "symbol": _matches(_SYMBOL),
    "match": _text,
    "review": _matches(_REVIEW),
}


def _drop_when(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, argument),) = value.items()
    return kind in _DROP_TESTS and _DROP_TESTS[kind](argument)


_TOP: Final[_Table] = {
    "id": (True, "<area>.<verb>-<object>, with @X.Y.Z on a variant", _matches(_ID)),
    "language": (True, "python", lambda value: value == "python"),
    "message": (True, f"one line of at most {MAX_MESSAGE_COLUMNS} columns", _message),
    "note": (True, f"1 to {MAX_NOTE_LINES} lines: why, and why no hook serves", _note),
    "url": (False, "a URL on github.com", _matches(_URL)),
    "severity": (True, "hint", lambda value: value == "hint"),
    "metadata": (True, "a mapping", lambda value: isinstance(value, dict)),
    "rule": (True, "an ast-grep rule", lambda value: isinstance(value, dict)),
    "fix": (True, "the matched text with our lines", _text),
}

_METADATA: Final[_Table] = {
    "kind": (True, f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
    "component": (True, "a component", lambda value: isinstance(value, str)),
    "releases": (True, 'a quoted range such as ">=0.5.16,<0.5.24"', _ranges),
    "expect": (False, "a count of at least 1", lambda n: type(n) is int and n > 0),
    "forwarded": (
        True,
        '"no", "not-needed: reason", "merged:X.Y.Z" or a URL',
        _matches(_FORWARDED),
    ),
    "drop_when": (
        True,
        "one of release: range, symbol: file.py::name, match: pattern, review: URL",
        _drop_when,
    ),
    "calls": (False, "sglang.<module>.<function> of the overlay", _matches(_DOTTED)),
    "commit": (False, "a commit of series.yml", _text),
    "proved_by": (True, "test/<file>.py::<class>::<test>", _matches(_TEST_ID)),
}
