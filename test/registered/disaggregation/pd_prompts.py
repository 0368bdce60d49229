"""Prompt sets of the end-to-end tests, and what unified serving answers to them.

The sets share no key, so nothing one set leaves in a cache can help another. Reference
answers are computed once per session, on engines that are stopped again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dspark_pd.bed import MODELS, Bed, Client, EngineSpec, Reply
from dspark_pd.bed.prompts import Prompt, make_prompts

#: Chunk of the prefill engines under test: "short" fits in one, "chunked" needs four.
CHUNK = 64
PAGE = 64


def _mixed() -> list[Prompt]:
    """Short, middle and long prompts in turn, from 20 to 260 tokens."""
    return [
        prompt
        for triple in zip(
            make_prompts(3, seed=21, key_len=(10, 14), prompt_tokens=(20, 30)),
            make_prompts(3, seed=22, key_len=(20, 39), prompt_tokens=(80, 120)),
            make_prompts(3, seed=23, key_len=(20, 39), prompt_tokens=(200, 260)),
            strict=True,
        )
        for prompt in triple
    ]


def _sliding_radix() -> list[Prompt]:
    """Three prompts, and one that the third is the beginning of."""
    prompts = make_prompts(3, seed=94, key_len=(10, 18), prompt_tokens=(140, 180))
    last = prompts[-1]
    begun = replace(last, ids=last.ids[:-60], text=last.text[:-60])
    return [*prompts[:2], begun, last]


#: Keys that a draft with a window of 32 can copy: the whole period fits in it.
_SLIDING_KEY = (10, 23)

PROMPT_SETS: Mapping[str, Sequence[Prompt]] = {
    "short": make_prompts(6, seed=11, key_len=(20, 39), prompt_tokens=(50, 60)),
    "mixed": _mixed(),
    "chunked": make_prompts(3, seed=31, prompt_tokens=(3 * CHUNK + 8, 4 * CHUNK)),
    "radix": make_prompts(3, seed=41, prompt_tokens=(100, 140)),
    "chat": make_prompts(2, seed=51, prompt_tokens=(64, 96)),
    "pages": make_prompts(2, seed=61, prompt_tokens=(4 * PAGE + 8, 5 * PAGE - 8)),
    # For the draft that sees 31 tokens: shorter than that, around it, far beyond it.
    "sliding-short": make_prompts(4, seed=91, key_len=(6, 9), prompt_tokens=(14, 24)),
    "sliding": make_prompts(6, seed=92, key_len=_SLIDING_KEY, prompt_tokens=(20, 60)),
    "sliding-long": make_prompts(
        4, seed=93, key_len=_SLIDING_KEY, prompt_tokens=(3 * CHUNK + 8, 5 * CHUNK)
    ),
    "sliding-radix": _sliding_radix(),
    # Enough tokens at once that a small decode pool must retract some requests.
    "sliding-beyond": make_prompts(
        10, seed=95, key_len=(10, 14), prompt_tokens=(60, 90), max_new_tokens=90
    ),
    # Longer than one key period: decode feeds on KV that it wrote itself.
    "beyond": make_prompts(3, seed=71, key_len=(10, 14), max_new_tokens=60),
}


def send(client: Client, name: str, **how: object) -> list[Reply]:
    """The answers to one prompt set, in its order."""
    prompts = PROMPT_SETS[name]
    return client.generate(
        [prompt.ids for prompt in prompts],
        [prompt.max_new_tokens for prompt in prompts],
        **how,
    )


class References:
    """Answers of unified serving, by draft and prompt set."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._answers: dict[tuple[Path | None, str], list[Reply]] = {}

    def get(self, name: str, draft: Path | None = MODELS.draft_full) -> list[Reply]:
        """Answers with DSPARK and this draft; without speculation for None."""
        if (draft, name) not in self._answers:
            # The two that nearly every test needs start side by side.
            self._compute({None, MODELS.draft_full, draft} - self._known())
        return self._answers[draft, name]

    def _known(self) -> set[Path | None]:
        return {draft for draft, _ in self._answers}

    def _compute(self, drafts: set[Path | None]) -> None:
        ordered = sorted(drafts, key=str)
        engines = self._bed.start(
            [
                EngineSpec(
                    f"unified-{d.name if d else 'no-spec'}", "unified", MODELS.target, d
                )
                for d in ordered
            ]
        )
        for draft, engine in zip(ordered, engines, strict=True):
            for name in PROMPT_SETS:
                self._answers[draft, name] = send(Client.unified(engine), name)
        self._bed.stop(*engines)
