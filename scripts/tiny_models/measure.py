"""The figures the manifest records, and the limits they must keep."""

from __future__ import annotations

from dspark_pd.bed.prompts import Prompt, make_prompts

from .models import Draft, Target
from .speculate import greedy_continuation, walk

#: Accept length asked for with and without the prompt's context.
AT_LEAST, AT_MOST = 3.5, 1.6


def prompt_sets(sliding: bool) -> dict[str, list[Prompt]]:
    """The prompts of each figure. A sliding draft needs keys inside its window."""
    keys = (14, 23) if sliding else (20, 39)
    return {
        "short": make_prompts(32, seed=101, key_len=keys, prompt_tokens=(64, 96)),
        "long": make_prompts(16, seed=102, key_len=keys, prompt_tokens=(560, 600)),
    }


def measure(target: Target, draft: Draft) -> dict[str, dict]:
    """Figures of one draft, by name; each is `Walk.as_dict()`."""
    sets = prompt_sets(draft.window is not None)
    short, long = sets["short"], sets["long"]
    # A block row at position p + j sees back to p + j - window + 1, so the first
    # block after the prompt reads at most window - 1 prompt rows.
    tail = 8 if draft.window is None else draft.window - 1
    figures = {
        "prompt context": walk(target, draft, short),
        "no prompt context": walk(target, draft, short, tail=0),
        f"last {tail} rows of context": walk(target, draft, short, tail=tail),
        "prompt context, prompts of 560 to 600 tokens": walk(target, draft, long),
        "no prompt context, prompts of 560 to 600 tokens": walk(
            target, draft, long, tail=0
        ),
    }
    return {name: figure.as_dict() for name, figure in figures.items()}


def copy_accuracy(target: Target) -> dict[str, float]:
    """Share of prompts whose greedy continuation is the exact copy, by prompt set."""
    sets = prompt_sets(sliding=False)
    sets["long key"] = make_prompts(
        8,
        seed=103,
        key_len=(100, 220),
        prompt_tokens=(500, 600),
        max_new_tokens=40,
        symbols=64,
    )
    return {
        f"{name} prompts": sum(
            greedy_continuation(target, prompt, 0) == prompt.expected
            for prompt in prompts
        )
        / len(prompts)
        for name, prompts in sets.items()
    }


def complaints(name: str, figures: dict[str, dict]) -> list[str]:
    """What is outside the limits; empty when the draft `name` is good."""
    found = []
    for label in figures:
        accept = figures[label]["accept_length"]
        if label.startswith("prompt context") and accept < AT_LEAST:
            found.append(f"{name}: expected >= {AT_LEAST} with {label}, found {accept}")
        if label.startswith("no prompt context") and accept > AT_MOST:
            found.append(f"{name}: expected <= {AT_MOST} with {label}, found {accept}")
    return found
