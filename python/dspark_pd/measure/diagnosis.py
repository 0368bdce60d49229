"""Names the cause of a pattern in the figures, and what to do next.

Figures are compared with the reference where there is one. Without it a tier is compared
with cold prompts, a prefill with the best one and the first steps with the later ones,
which a workload can also explain: the finding then says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from dspark_pd.measure.statistics import LOSS_BELOW, REST, STEPS, Figure, Measured

BAD_DRAFT_BELOW: Final = 1.5
"""An accept length that no working draft has: half of its steps commit one token."""


@dataclass(frozen=True)
class Cause:
    """What a code means and what to do next; both may name a place in braces."""

    means: str
    next: str


CAUSES: Final[Mapping[str, Cause]] = {
    "MEASURE-HANDOFF": Cause(
        "decode starts without the draft's context of the prompt",
        "dspark-pd doctor --prefill URL --decode URL; prefill needs DSPARK itself, or the "
        "handoff of hidden states",
    ),
    "MEASURE-EARLY-STEPS": Cause(
        "decode may start without the draft's context; the prompts may explain it too",
        "measure again with --reference URL of one server that runs the same models",
    ),
    "MEASURE-STORAGE-WITHOUT-DRAFT": Cause(
        "prefill read entries whose draft KV is not of this draft: another draft stored "
        "them, or an engine without one",
        "stop prefill, empty the storage of HiCache or name another one, start again",
    ),
    "MEASURE-CACHE-WITHOUT-DRAFT": Cause(
        "prompts found in prefill's {place} cache come without the draft's KV",
        "empty the caches (POST /flush_cache on prefill) and measure again with --repeat "
        "2; if the loss is back, report it with this report",
    ),
    "MEASURE-ONE-PREFILL": Cause(
        "{place} hands over no draft context, or not all of it",
        "dspark-pd doctor --prefill {place} --decode URL, and compare its --speculative "
        "flags with those of the other prefills",
    ),
    "MEASURE-DRAFT": Cause(
        "the draft does not fit the target, or these prompts; the split loses nothing",
        "check --speculative-draft-model-path against the draft's model card; measure "
        "with --dataset repeat, which a working draft continues well",
    ),
    "MEASURE-NO-SPECULATION": Cause(
        "decode does not speculate",
        "start decode with --speculative-algorithm DSPARK; dspark-pd doctor shows what "
        "both engines run with",
    ),
    "MEASURE-SOME-WITHOUT-SPECULATION": Cause(
        "some decode engines behind this address do not speculate",
        "compare --speculative-algorithm of all decode engines",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One cause; ``code`` is stable, ``seen`` is the pattern that it was told from."""

    code: str
    cause: str
    seen: str
    next: str

    @classmethod
    def of(cls, code: str, seen: str, place: str = "") -> Finding:
        cause = CAUSES[code]
        means, further = (t.format(place=place) for t in (cause.means, cause.next))
        return cls(code, means, seen, further)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def diagnose(measured: Measured) -> list[Finding]:
    """What is wrong, the most specific cause first; empty when nothing is."""
    idle = measured.without_speculation
    if idle == 1.0:
        seen = "no request reports a verify step, and each event has one token"
        return [Finding.of("MEASURE-NO-SPECULATION", seen)]
    found = []
    if idle:
        seen = f"{idle:.0%} of the requests report no verify step"
        found.append(Finding.of("MEASURE-SOME-WITHOUT-SPECULATION", seen))
    draft = _draft(measured)
    if draft:
        return [*found, draft]
    groups = [*_prefills(measured.by_prefill()), *_tiers(measured.by_tier())]
    return [*found, *(groups or _handoff(measured))]


def _draft(measured: Measured) -> Finding | None:
    overall = measured.overall
    mine, theirs = overall.accept_length, overall.reference
    if (
        not mine
        or not theirs
        or theirs >= BAD_DRAFT_BELOW
        or mine < LOSS_BELOW * theirs
    ):
        return None
    seen = f"accept length {mine:.2f}, and {theirs:.2f} on the reference, which hands "
    return Finding.of("MEASURE-DRAFT", seen + "nothing over")


def _prefills(figures: Mapping[str, Figure]) -> list[Finding]:
    low = _low(figures, _best(figures))
    if not low or len(low) == len(figures):
        return []
    others = max(_worth(f) for name, f in figures.items() if name not in low)
    return [
        Finding.of(
            "MEASURE-ONE-PREFILL",
            f"{_how(figures[name])} there, {others:.2f} on the best prefill",
            name,
        )
        for name in low
    ]


def _tiers(figures: Mapping[str, Figure]) -> list[Finding]:
    cold = figures.get("cold")
    low = _low({k: f for k, f in figures.items() if k != "cold"}, cold)
    if not low or (cold is not None and cold.ratio and cold.ratio < LOSS_BELOW):
        return []
    seen = "; ".join(f"{name}: {_how(figures[name])}" for name in low)
    seen += f"; cold: {_how(cold)}" if cold else ""
    if "storage" in low:
        return [Finding.of("MEASURE-STORAGE-WITHOUT-DRAFT", seen)]
    return [Finding.of("MEASURE-CACHE-WITHOUT-DRAFT", seen, " and ".join(low))]


def _handoff(measured: Measured) -> list[Finding]:
    steps = measured.by_step()
    early = _early(steps)
    if measured.reference is None:
        return _unproven(early, steps.get(REST))
    if early.ratio is None or early.ratio >= LOSS_BELOW:
        return []
    end = measured.loss_ends_at()
    heals = (
        f"and the loss ends at step {end}, as decode's own tokens fill the context"
        if end
        else f"and no end of it in the {len(steps)} steps measured; larger "
        "--new-tokens show whether it heals"
    )
    seen = f"ratio {early.ratio:.2f} at steps 1 to {STEPS}, {heals}"
    return [Finding.of("MEASURE-HANDOFF", seen)]


def _unproven(early: Figure, rest: Figure | None) -> list[Finding]:
    mine, later = early.accept_length, rest.accept_length if rest else None
    if not mine or not later or mine >= LOSS_BELOW * later:
        return []
    seen = f"accept length {mine:.2f} at steps 1 to {STEPS}, {later:.2f} after them"
    return [Finding.of("MEASURE-EARLY-STEPS", seen)]


def _early(figures: Mapping[str, Figure]) -> Figure:
    chosen = [f for name, f in figures.items() if name != REST]
    tokens = sum(f.tokens for f in chosen)
    steps = sum(f.verify_steps for f in chosen)
    # What the reference would have committed in as many steps.
    beside = [(f.reference, f.verify_steps) for f in chosen if f.reference is not None]
    reference = None
    if beside:
        reference = sum(r * n for r, n in beside) / sum(n for _, n in beside)
    return Figure(
        max((f.requests for f in chosen), default=0), tokens, steps, reference
    )


def _best(figures: Mapping[str, Figure]) -> Figure | None:
    known = [f for f in figures.values() if f.accept_length]
    return max(known, key=_worth, default=None)


def _worth(figure: Figure) -> float:
    return figure.ratio if figure.ratio is not None else figure.accept_length or 0.0


def _low(figures: Mapping[str, Figure], base: Figure | None) -> list[str]:
    """Those with a loss: against the reference, else against ``base``."""
    low = []
    for name, figure in figures.items():
        if figure.ratio is not None:
            if figure.ratio < LOSS_BELOW:
                low.append(name)
        elif (
            figure.accept_length
            and base
            and figure.accept_length < LOSS_BELOW * (base.accept_length or 0)
        ):
            low.append(name)
    return low


def _how(figure: Figure) -> str:
    if figure.ratio is not None:
        return f"ratio {figure.ratio:.2f}"
    return f"accept length {figure.accept_length or 0:.2f}"
