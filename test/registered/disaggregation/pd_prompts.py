"""Prompt sets of the end-to-end tests, and what unified serving answers to them.

The sets share no key, so nothing one set leaves in a cache can help another. Reference
answers are computed once per session, on engines that are stopped again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


PROMPT_SETS: Mapping[str, Sequence[Prompt]] = {
    "short": make_prompts(6, seed=11, key_len=(20, 39), prompt_tokens=(50, 60)),
    "mixed": _mixed(),
    "chunked": make_prompts(3, seed=31, prompt_tokens=(3 * CHUNK + 8, 4 * CHUNK)),
    "radix": make_prompts(3, seed=41, prompt_tokens=(100, 140)),
    "chat": make_prompts(2, seed=51, prompt_tokens=(64, 96)),
    "pages": make_prompts(2, seed=61, prompt_tokens=(4 * PAGE + 8, 5 * PAGE - 8)),
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
