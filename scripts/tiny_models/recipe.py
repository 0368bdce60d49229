"""How long, on what and how fast: every number of the training, in one place."""

from __future__ import annotations

from dataclasses import asdict

from .task import Lengths
from .training import Phase, Recipe

SEED = 7

#: Short keys first: copying heads form on them several times sooner.
_FIRST = (Lengths(batch=64, tokens=48, key_lo=4, key_hi=14),)
_MIDDLE = Lengths(batch=32, tokens=112, key_lo=6, key_hi=39)
_MIDDLE_SLIDING = Lengths(batch=32, tokens=112, key_lo=6, key_hi=23)

TARGET = Recipe(
    phases=(
        Phase(150, _FIRST),
        Phase(450, (_MIDDLE,)),
        Phase(
            400,
            (
                _MIDDLE,
                Lengths(batch=10, tokens=320, key_lo=6, key_hi=120),
                Lengths(batch=5, tokens=680, key_lo=6, key_hi=39),
                Lengths(batch=5, tokens=680, key_lo=60, key_hi=220),
            ),
        ),
    )
)

_RECALL = (
    Lengths(batch=8, tokens=448, key_lo=40, key_hi=100, recall=True),
    Lengths(batch=5, tokens=768, key_lo=40, key_hi=100, recall=True),
    _MIDDLE,
)
_RECALL_NEAR = Lengths(batch=16, tokens=224, key_lo=40, key_hi=80, recall=True)

RECIPES = {
    "tiny-target": TARGET,
    "tiny-draft-full": Recipe(
        phases=(
            Phase(150, _FIRST),
            Phase(550, (_MIDDLE,)),
            Phase(
                400,
                (
                    _MIDDLE,
                    Lengths(batch=10, tokens=320, key_lo=6, key_hi=120),
                    Lengths(batch=5, tokens=680, key_lo=6, key_hi=39),
                ),
            ),
        )
    ),
    "tiny-draft-sliding": Recipe(
        phases=(
            Phase(150, _FIRST),
            Phase(450, (_MIDDLE_SLIDING,)),
            Phase(
                200,
                (
                    _MIDDLE_SLIDING,
                    Lengths(batch=5, tokens=680, key_lo=6, key_hi=23),
                ),
            ),
        )
    ),
    # These two go on from the pair above.
    "tiny-target-recall": Recipe(
        phases=(Phase(100, (_MIDDLE, _RECALL_NEAR)), Phase(400, _RECALL)),
        lr=2e-3,
        lr_other=1e-3,
    ),
    "tiny-draft-recall": Recipe(
        phases=(Phase(150, (_MIDDLE, _RECALL_NEAR)), Phase(650, _RECALL)),
        lr=3e-3,
        lr_other=1.5e-3,
    ),
}


def as_dict() -> dict:
    """The recipe as the manifest records it."""
    return {"seed": SEED, **{name: asdict(recipe) for name, recipe in RECIPES.items()}}
