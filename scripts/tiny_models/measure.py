"""The figures the manifest records, and the limits they must keep."""

from __future__ import annotations

from dspark_pd.bed.prompts import Prompt, make_prompts, make_recall_prompts

from .models import Draft, Target
from .speculate import greedy_continuation, walk

#: Accept length asked for with and without the prompt's context.
AT_LEAST, AT_MOST = 3.5, 1.6
#: The same with less context than a recall prompt asks for.
PARTIAL_AT_MOST = 2.0
#: The draft that is asked for keys of several hundred tokens before.
RECALL = "tiny-draft-recall"


def prompt_sets(sliding: bool) -> dict[str, list[Prompt]]:
    """The prompts of each figure. A sliding draft needs keys inside its window."""
    keys = (14, 23) if sliding else (20, 39)
    return {
        "short": make_prompts(32, seed=101, key_len=keys, prompt_tokens=(64, 96)),
        "long": make_prompts(16, seed=102, key_len=keys, prompt_tokens=(560, 600)),
    }


def measure(name: str, target: Target, draft: Draft) -> dict[str, dict]:
    """Figures of the draft `name`, by label; each is `Walk.as_dict()`."""
    if name == RECALL:
        return _measure_recall(target, draft)
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


def recall_prompts() -> list[Prompt]:
    return make_recall_prompts(16, seed=104)


def _measure_recall(target: Target, draft: Draft) -> dict[str, dict]:
    prompts = recall_prompts()
    tails = {
        "prompt context": None,
        "last 64 rows of context": 64,
        "no prompt context": 0,
    }
    return {
        label: walk(target, draft, prompts, tail=tail).as_dict()
        for label, tail in tails.items()
    }


def copy_accuracy(name: str, target: Target) -> dict[str, float]:
    """Share of prompts whose greedy continuation is the exact copy, by prompt set."""
    sets = prompt_sets(sliding=False)
    if name == "tiny-target-recall":
        sets["recall"] = recall_prompts()
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
        if label == "last 64 rows of context" and accept > PARTIAL_AT_MOST:
            found.append(
                f"{name}: expected <= {PARTIAL_AT_MOST} with {label}, found {accept}"
            )
        if label.startswith("no prompt context") and accept > AT_MOST:
            found.append(f"{name}: expected <= {AT_MOST} with {label}, found {accept}")
    return found
