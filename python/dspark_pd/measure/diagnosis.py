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
class Finding:
    """One cause; ``code`` is stable, ``seen`` is the pattern that it was told from."""

    code: str
    cause: str
    seen: str
    next: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def diagnose(measured: Measured) -> list[Finding]:
    """What is wrong, the most specific cause first; empty when nothing is."""
    idle = measured.without_speculation
    if idle == 1.0:
        return [_no_speculation()]
    found = [_some_without(idle)] if idle else []
    draft = _draft(measured)
    if draft:
        return [*found, draft]
    groups = [*_prefills(measured.by_prefill()), *_tiers(measured.by_tier())]
    return [*found, *(groups or _handoff(measured))]


def _no_speculation() -> Finding:
    return Finding(
        "MEASURE-NO-SPECULATION",
        "decode does not speculate",
        "no request reports a verify step, and each event has one token",
        "start decode with --speculative-algorithm DSPARK; dspark-pd doctor shows what "
        "both engines run with",
    )


def _some_without(share: float) -> Finding:
    return Finding(
        "MEASURE-SOME-WITHOUT-SPECULATION",
        "some decode engines behind this address do not speculate",
        f"{share:.0%} of the requests report no verify step",
        "compare --speculative-algorithm of all decode engines",
    )


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
    return Finding(
        "MEASURE-DRAFT",
        "the draft does not fit the target, or these prompts; the split loses nothing",
        f"accept length {mine:.2f}, and {theirs:.2f} on the reference, which hands "
        "nothing over",
        "check --speculative-draft-model-path against the draft's model card; measure "
        "with --dataset repeat, which a working draft continues well",
    )


def _prefills(figures: Mapping[str, Figure]) -> list[Finding]:
    low = _low(figures, _best(figures))
    if not low or len(low) == len(figures):
        return []
    others = max(_worth(f) for name, f in figures.items() if name not in low)
    return [
        Finding(
            "MEASURE-ONE-PREFILL",
            f"{name} hands over no draft context, or not all of it",
            f"{_how(figures[name])} there, {others:.2f} on the best prefill",
            f"dspark-pd doctor --prefill {name} --decode URL, and compare its "
            "--speculative flags with those of the other prefills",
        )
        for name in low
    ]


def _tiers(figures: Mapping[str, Figure]) -> list[Finding]:
    cold = figures.get("cold")
    low = _low({k: f for k, f in figures.items() if k != "cold"}, cold)
    if not low or (cold is not None and cold.ratio and cold.ratio < LOSS_BELOW):
        return []
    if "storage" in low:
        seen = f"{_how(figures['storage'])} on hits in storage"
        return [
            Finding(
                "MEASURE-STORAGE-WITHOUT-DRAFT",
                "prefill read entries whose draft KV is not of this draft: another draft "
                "stored them, or an engine without one",
                seen + (f", {_how(cold)} on cold prompts" if cold else ""),
                "stop prefill, empty the storage of HiCache or name another one, start "
                "again",
            )
        ]
    return [
        Finding(
            "MEASURE-CACHE-WITHOUT-DRAFT",
            f"prompts found in prefill's {' and '.join(low)} cache come without the "
            "draft's KV",
            "; ".join(f"{name}: {_how(figures[name])}" for name in low)
            + (f"; cold: {_how(cold)}" if cold else ""),
            "empty the caches (POST /flush_cache on prefill) and measure again with "
            "--repeat 2; if the loss is back, report it with this report",
        )
    ]


def _handoff(measured: Measured) -> list[Finding]:
    steps = measured.by_step()
    early = _early(steps)
    rest = steps.get(REST)
    if measured.reference is None:
        return _unproven(early, rest)
    if early.ratio is None or early.ratio >= LOSS_BELOW:
        return []
    end = measured.loss_ends_at()
    heals = (
        f"and the loss ends at step {end}, as decode's own tokens fill the context"
        if end
        else f"and no end of it in the {len(steps)} steps measured; larger "
        "--new-tokens show whether it heals"
    )
    return [
        Finding(
            "MEASURE-HANDOFF",
            "decode starts without the draft's context of the prompt",
            f"ratio {early.ratio:.2f} at steps 1 to {STEPS}, {heals}",
            "dspark-pd doctor --prefill URL --decode URL; prefill needs DSPARK itself, or "
            "the handoff of hidden states",
        )
    ]


def _unproven(early: Figure, rest: Figure | None) -> list[Finding]:
    mine, later = early.accept_length, rest.accept_length if rest else None
    if not mine or not later or mine >= LOSS_BELOW * later:
        return []
    return [
        Finding(
            "MEASURE-EARLY-STEPS",
            "decode may start without the draft's context; the prompts may explain it too",
            f"accept length {mine:.2f} at steps 1 to {STEPS}, {later:.2f} after them",
            "measure again with --reference URL of one server that runs the same models",
        )
    ]


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
