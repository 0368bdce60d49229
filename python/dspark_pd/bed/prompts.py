"""Prompts whose continuation can only come from the prompt.

A prompt is one random key and a separator, repeated and cut at a random place; the
right continuation goes on copying the key. Nothing in the weights can guess it, so
a draft that lost its prompt context stops being accepted within one key period.
After one period the decode engine's own commits hold the key again: that is why
``max_new_tokens`` never exceeds the period by default.

Life cycle: `make_prompts` is a pure function of its arguments; the same seed gives
the same prompts on every machine and Python version from 3.8 on.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

#: The 64 symbols of a key. One symbol is one byte and one token.
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
#: Ends every copy of the key; never part of one.
SEPARATOR = "|"
#: Every prompt shows the whole key once and then at least this many tokens of its
#: second copy: shorter prompts do not say where in the key they stopped.
MIN_REPEATED_TOKENS = 4
#: Symbols of the key of a recall prompt; what separates its two copies uses the others.
RECALL_SYMBOLS = 32
#: Tokens of the second copy that a recall prompt shows.
RECALL_SHOWN_TOKENS = 6


@dataclass(frozen=True)
class Prompt:
    """One prompt and what a model that copies perfectly says next.

    ids: token ids, equal to the bytes of `text`.
    text: the same prompt as ASCII text.
    key_len: symbols in the key; one period is ``key_len + 1`` tokens.
    max_new_tokens: tokens to generate, at most one period unless asked otherwise.
    expected: the ``max_new_tokens`` token ids that continue the copy.
    """

    ids: list[int]
    text: str
    key_len: int
    max_new_tokens: int
    expected: list[int]


def make_prompts(
    count: int,
    seed: int = 0,
    key_len: tuple[int, int] = (20, 39),
    prompt_tokens: tuple[int, int] = (64, 96),
    max_new_tokens: int | None = None,
    symbols: int = 16,
) -> list[Prompt]:
    """`count` prompts, drawn from `seed`.

    `key_len` and `prompt_tokens` are inclusive ranges; a prompt too short for its
    key is lengthened until it shows the key once and the start of its second copy.
    `max_new_tokens` defaults to one key period, prompt by prompt.
    `symbols`: how many different symbols a key is drawn from. Fewer make places in the
    key look alike, so that a good draft is refused now and then; 16 leaves a target
    that copies exactly and a draft that does not always. 64 is the easiest.
    Raises ValueError when a range is empty or not positive, or `symbols` outside
    1 .. 64.
    """
    for name, (low, high) in (("key_len", key_len), ("prompt_tokens", prompt_tokens)):
        if not 1 <= low <= high:
            raise ValueError(
                f"make_prompts: expected 1 <= low <= high for {name}, "
                f"found ({low}, {high}); pass an inclusive range."
            )
    if not 1 <= symbols <= len(ALPHABET):
        raise ValueError(
            f"make_prompts: expected symbols in 1 .. {len(ALPHABET)}, found {symbols}."
        )
    rng = random.Random(seed)
    return [
        _one_prompt(rng, key_len, prompt_tokens, max_new_tokens, symbols)
        for _ in range(count)
    ]


def make_recall_prompts(
    count: int,
    seed: int = 0,
    key_len: tuple[int, int] = (50, 80),
    distance: tuple[int, int] = (200, 300),
) -> list[Prompt]:
    """`count` prompts that ask for a key seen `distance` tokens before, from `seed`.

    A key, that many random symbols which the key does not use, and the key's first
    tokens again: only what the prompt holds `distance` positions back tells the rest,
    to the end of the key. `key_len` and `distance` are inclusive ranges.
    """
    rng = random.Random(seed)
    return [_recall_prompt(rng, key_len, distance) for _ in range(count)]


def _recall_prompt(
    rng: random.Random, key_len: tuple[int, int], distance: tuple[int, int]
) -> Prompt:
    length, between = rng.randint(*key_len), rng.randint(*distance)
    symbols = rng.sample(ALPHABET, len(ALPHABET))
    own, others = symbols[:RECALL_SYMBOLS], symbols[RECALL_SYMBOLS:]
    key = "".join(rng.choice(own) for _ in range(length)) + SEPARATOR
    filler = "".join(rng.choice(others) for _ in range(between)) + SEPARATOR
    shown = key[:RECALL_SHOWN_TOKENS]
    text = key + filler + shown
    return Prompt(
        ids=list(text.encode("ascii")),
        text=text,
        key_len=length,
        max_new_tokens=length - len(shown),
        expected=list(key[len(shown) : length].encode("ascii")),
    )


def _one_prompt(
    rng: random.Random,
    key_len: tuple[int, int],
    prompt_tokens: tuple[int, int],
    max_new_tokens: int | None,
    symbols: int,
) -> Prompt:
    length = rng.randint(*key_len)
    own = rng.sample(ALPHABET, symbols)
    key = "".join(rng.choice(own) for _ in range(length))
    unit = key + SEPARATOR
    total = max(rng.randint(*prompt_tokens), len(unit) + MIN_REPEATED_TOKENS)
    new = len(unit) if max_new_tokens is None else max_new_tokens
    stream = unit * ((total + new) // len(unit) + 1)
    text = stream[:total]
    return Prompt(
        ids=list(text.encode("ascii")),
        text=text,
        key_len=length,
        max_new_tokens=new,
        expected=list(stream[total : total + new].encode("ascii")),
    )
