"""Accept length by step, prompt length, cache tier and prefill, beside a reference.

Accept length is completion tokens per verify step, as SGLang reports it. The first token
comes from prefill: it is in the mean of a request and in no step. A ratio compares the
requests of a group with the same prompts, in the same round, on the reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dspark_pd.measure.client import TIERS, Served

STEPS: Final = 16
REST: Final = f"{STEPS + 1}+"
"""All steps after those that have a figure of their own."""
LOSS_BELOW: Final = 0.95
"""A ratio below this is a loss; a mean over few requests differs that much by chance."""
_DIGITS: Final = 4


@dataclass(frozen=True)
class Figure:
    """A group of requests, or one step of all requests; ``tokens`` in ``verify_steps``."""

    requests: int
    tokens: int
    verify_steps: int
    reference: float | None = None
    median_ttft_ms: float | None = None

    @property
    def accept_length(self) -> float | None:
        return self.tokens / self.verify_steps if self.verify_steps else None

    @property
    def ratio(self) -> float | None:
        """Accept length over that of the reference; None without either."""
        mine = self.accept_length
        return mine / self.reference if mine and self.reference else None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "requests": self.requests,
            "tokens": self.tokens,
            "spec_verify_ct": self.verify_steps,
            "accept_length": _rounded(self.accept_length),
        }
        if self.median_ttft_ms is not None:
            found["median_ttft_ms"] = _rounded(self.median_ttft_ms)
        if self.reference is not None:
            found["reference_accept_length"] = _rounded(self.reference)
            found["ratio"] = _rounded(self.ratio)
        return found


@dataclass(frozen=True)
class Speed:
    """What the same requests say of time."""

    output_throughput: float | None
    mean_ttft_ms: float | None
    median_ttft_ms: float | None

    @classmethod
    def of(cls, served: Sequence[Served], seconds: float) -> Speed:
        first = _first_tokens_ms(served)
        tokens = sum(s.completion_tokens for s in served)
        return cls(
            tokens / seconds if seconds else None,
            statistics.mean(first) if first else None,
            statistics.median(first) if first else None,
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Measured:
    """Everything known of a run, complete or not.

    ``seconds`` and ``reference_seconds`` are the times in which requests were running.
    """

    served: Sequence[Served]
    reference: Sequence[Served] | None = None
    seconds: float = 0.0
    reference_seconds: float = 0.0
    planned: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> list[Served]:
        return [s for s in self.served if s.error is None]

    @property
    def failed(self) -> list[Served]:
        return [s for s in self.served if s.error is not None]

    @property
    def reference_failed(self) -> list[Served]:
        return [s for s in self.reference or () if s.error is not None]

    @property
    def pairs(self) -> list[tuple[Served, Served]]:
        """Requests that the reference has answered too."""
        known = {
            (s.prompt, s.round): s for s in self.reference or () if s.error is None
        }
        return [
            (s, known[s.prompt, s.round])
            for s in self.good
            if (s.prompt, s.round) in known
        ]

    @property
    def overall(self) -> Figure:
        return self._of(lambda served: True)

    @property
    def without_speculation(self) -> float | None:
        """Share of requests that asked for more than the first token and ran no step."""
        able = [s for s in self.good if s.completion_tokens > 1]
        idle = [s for s in able if s.verify_steps is None]
        return len(idle) / len(able) if able else None

    @property
    def same_text(self) -> float | None:
        """Share of requests with the reference's text; None without a reference."""
        same = [mine.text == theirs.text for mine, theirs in self.pairs]
        return sum(same) / len(same) if same else None

    @property
    def unread_steps(self) -> int:
        """Requests whose steps could not be told apart."""
        return _unread(self.good)

    @property
    def reference_unread_steps(self) -> int:
        return _unread([s for s in self.reference or () if s.error is None])

    def by_step(self) -> dict[str, Figure]:
        """One figure for each of the first steps, one for the rest."""
        counted = [s for s in self.good if s.steps is not None and s.verify_steps]
        pairs = [
            (mine, theirs)
            for mine, theirs in self.pairs
            if None not in (mine.steps, theirs.steps)
            and mine.verify_steps
            and theirs.verify_steps
        ]
        if self.reference is not None:
            counted = [mine for mine, _ in pairs]
        mine = by_step([s.steps or () for s in counted])
        theirs = by_step([theirs.steps or () for _, theirs in pairs])
        return {
            name: _beside(
                figure, theirs[name].accept_length if name in theirs else None
            )
            for name, figure in mine.items()
        }

    def by_prompt_length(self) -> dict[str, Figure]:
        return self._groups(_length_of, _numeric)

    def by_tier(self) -> dict[str, Figure]:
        return self._groups(lambda served: served.tier)

    def by_prefill(self) -> dict[str, Figure]:
        return self._groups(lambda served: served.prefill or "unknown")

    def _groups(
        self,
        name_of: Callable[[Served], str],
        order: Callable[[str], Any] = str,
    ) -> dict[str, Figure]:
        names = sorted({name_of(s) for s in self.good}, key=order)
        return {
            name: self._of(lambda served, name=name: name_of(served) == name)  # type: ignore[misc]
            for name in names
        }

    def _of(self, belongs: Callable[[Served], bool]) -> Figure:
        mine = [s for s in self.good if belongs(s) and s.verify_steps]
        if self.reference is None:
            return _total(mine)
        pairs = [
            (s, theirs)
            for s, theirs in self.pairs
            if belongs(s) and s.verify_steps and theirs.verify_steps
        ]
        if not pairs:
            return _total(mine)
        reference = _total([theirs for _, theirs in pairs]).accept_length
        return _beside(_total([s for s, _ in pairs]), reference)

    def loss_ends_at(self) -> int | None:
        """The first step from which on there is no loss; 1 without any, None if never."""
        ratios = {
            number: figure.ratio
            for number, figure in enumerate(self.by_step().values(), 1)
            if figure.ratio is not None
        }
        if not ratios:
            return None
        low = [number for number, ratio in ratios.items() if ratio < LOSS_BELOW]
        if not low:
            return 1
        return None if low[-1] == max(ratios) else low[-1] + 1


def _unread(served: Sequence[Served]) -> int:
    return sum(s.steps is None for s in served if s.verify_steps)


def _beside(figure: Figure, reference: float | None) -> Figure:
    return replace(figure, reference=reference)


def _total(served: Sequence[Served]) -> Figure:
    tokens = sum(s.completion_tokens for s in served)
    steps = sum(s.verify_steps or 0 for s in served)
    first = _first_tokens_ms(served)
    median = statistics.median(first) if first else None
    return Figure(len(served), tokens, steps, median_ttft_ms=median)


def _first_tokens_ms(served: Sequence[Served]) -> list[float]:
    return [1000 * s.first_token_s for s in served if s.first_token_s is not None]


def by_step(requests: Sequence[Sequence[int]]) -> dict[str, Figure]:
    """One figure for each of the first steps and one for the rest, of those reached.

    ``requests``: the tokens of each verify step, for each request.
    """
    wanted = {str(n): slice(n - 1, n) for n in range(1, STEPS + 1)}
    wanted[REST] = slice(STEPS, None)
    found = {}
    for name, part in wanted.items():
        reached = [steps[part] for steps in requests if steps[part]]
        if reached:
            tokens, steps = sum(map(sum, reached)), sum(map(len, reached))
            found[name] = Figure(len(reached), tokens, steps)
    return found


def _length_of(served: Served) -> str:
    return _range_with(served.prompt_tokens)


def _range_with(tokens: int) -> str:
    """A range of prompt lengths, from one power of two to the next."""
    top = 1 << max(tokens - 1, 0).bit_length()
    return f"{top // 2 + 1}-{top}"


def can_be_named(kind: str, name: str) -> bool:
    """Whether a run can have a group of this name; any text may be a prefill."""
    if kind == "step":
        return name in {REST, *map(str, range(1, STEPS + 1))}
    if kind == "tier":
        return name in {"cold", "cached", *TIERS}
    if kind == "prompt":
        first = name.partition("-")[0]
        return first.isdecimal() and name == _range_with(int(first))
    return kind == "prefill" and bool(name)


def _numeric(name: str) -> int:
    return int(name.partition("-")[0])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def lowest(figures: Mapping[str, Figure]) -> float | None:
    """The lowest ratio of several figures."""
    return min((f.ratio for f in figures.values() if f.ratio is not None), default=None)
