"""What is sent: prompts of a file, or made ones that no cache has seen.

A made ``repeat`` prompt is a random key that repeats itself: its continuation is in the
prompt alone, so a draft without the prompt's context fails on it. ``random`` is words of
random letters, which no draft can continue well.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DATASETS: Final = ("repeat", "random")
_LETTERS: Final = string.ascii_letters + string.digits
_KEY: Final = (10, 23)
_SYMBOLS: Final = 16


@dataclass(frozen=True)
class Prompt:
    """Text, chat messages or token ids; exactly one of them is set."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    ids: tuple[int, ...] | None = None


def make_prompts(dataset: str, count: int, length: int, seed: int) -> list[Prompt]:
    """``count`` prompts of about ``length`` to half as many characters, from a seed."""
    dice = random.Random(seed)
    make = _repeated if dataset == "repeat" else _scattered
    return [
        Prompt(text=make(dice, dice.randint(max(length // 2, 1), length)))
        for _ in range(count)
    ]


def _repeated(dice: random.Random, length: int) -> str:
    own = dice.sample(_LETTERS, _SYMBOLS)
    key = "".join(dice.choice(own) for _ in range(dice.randint(*_KEY))) + "|"
    return (key * (length // len(key) + 2))[:length]


def _scattered(dice: random.Random, length: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < length:
        words.append("".join(dice.choices(_LETTERS, k=dice.randint(2, 9))))
    return " ".join(words)[:length]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file, one in each line: JSON, or else the text itself.

    JSON is a string, or an object with ``prompt``, ``text``, ``messages`` or
    ``input_ids``. Raises ValueError that names the line which is none of these.
    """
    # JSON may hold other ends of lines, such as U+2028, as they are.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_parse(n, line) for n, line in enumerate(lines, 1) if line.strip()]


def _parse(number: int, line: str) -> Prompt:
    if line.lstrip()[:1] not in ("{", '"'):
        return Prompt(text=line)
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from None
    if isinstance(found, str):
        return Prompt(text=found)
    for key in ("text", "prompt"):
        if isinstance(found.get(key), str):
            return Prompt(text=found[key])
    messages, ids = found.get("messages"), found.get("input_ids")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        return Prompt(messages=tuple(messages))
    if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
        return Prompt(ids=tuple(ids))
    keys = ", ".join(found) or "no key"
    raise ValueError(
        f"line {number} has {keys}, and none of text, prompt, messages and input_ids"
    )
