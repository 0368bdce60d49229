"""Train the tiny models, or check the ones that are there."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from . import files, measure
from .models import Draft, Shape, Target
from .recipe import RECIPES, SEED, as_dict
from .training import draft_loss, target_loss, train

#: Targets, and the one whose weights each starts with.
TARGETS = {"tiny-target": None, "tiny-target-recall": "tiny-target"}


@dataclass(frozen=True)
class DraftPlan:
    """How a draft is made. window None is full attention; begins_as: a draft whose
    weights it starts with."""

    target: str
    window: int | None = None
    begins_as: str | None = None


DRAFTS = {
    "tiny-draft-full": DraftPlan("tiny-target"),
    "tiny-draft-sliding": DraftPlan("tiny-target", window=32),
    "tiny-draft-recall": DraftPlan("tiny-target-recall", begins_as="tiny-draft-full"),
}


def say(text: str) -> None:
    print(text, flush=True)


def build(out: Path) -> int:
    """Train what `out` does not hold yet; -> exit code."""
    manifest = _read_manifest(out)
    cpu_seconds = manifest.get("training_cpu_seconds", {})
    for name in (*TARGETS, *DRAFTS):
        if (out / name).exists():
            say(f"{name}: kept")
            continue
        began = time.process_time()
        if name in TARGETS:
            _train_target(name, out)
        else:
            _train_draft(name, out)
        cpu_seconds[name] = round(time.process_time() - began)
    measured = _measure(out)
    manifest = {
        "schema": 1,
        "recipe": {**as_dict(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "training_cpu_seconds": cpu_seconds,
        "measured": measured,
        "files": files.file_record(out),
    }
    files.write_json(out / files.MANIFEST, manifest)
    return verdict(measured)


def _read_manifest(out: Path) -> dict:
    path = out / files.MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _target(name: str, out: Path) -> Target:
    target = Target(Shape(layers=4))
    files.read_checkpoint(target, out / name)
    return target.requires_grad_(False)


def _draft(name: str, out: Path) -> Draft:
    draft = Draft(Shape(layers=2), DRAFTS[name].window)
    files.read_checkpoint(draft, out / name)
    return draft.requires_grad_(False)


def _train_target(name: str, out: Path) -> None:
    torch.manual_seed(SEED)
    target = Target(Shape(layers=4))
    if TARGETS[name]:
        files.read_checkpoint(target, out / TARGETS[name])
    say(f"{name}: {parameters(target)} parameters; figure: copy accuracy")
    train(target, target_loss(target), RECIPES[name], SEED, say)
    files.round_weights(target)
    files.write_checkpoint(target, files.target_config(target), out / name)
    files.write_tokenizer(out / name)


def _train_draft(name: str, out: Path) -> None:
    torch.manual_seed(SEED + 1)
    plan, recipe = DRAFTS[name], RECIPES[name]
    target, draft = _target(plan.target, out), Draft(Shape(layers=2), plan.window)
    if plan.begins_as:
        files.read_checkpoint(draft, out / plan.begins_as)
    say(f"{name}: {parameters(draft)} parameters; figure: accept length of blocks")
    loss = draft_loss(target, draft, recipe.anchors)
    train(draft, loss, recipe, SEED + 1, say)
    files.round_weights(draft)
    files.write_checkpoint(draft, files.draft_config(draft, target), out / name)


def check(assets: Path) -> int:
    """Hashes against the manifest, then the figures against the limits."""
    found = files.file_record(assets)
    recorded = _read_manifest(assets).get("files", {})
    names = found.keys() | recorded.keys()
    wrong = sorted(n for n in names if found.get(n) != recorded.get(n))
    for name in wrong:
        say(f"{name}: expected {recorded.get(name)}, found {found.get(name)}")
    if wrong:
        say("The manifest and the files disagree; train again or restore them.")
        return 1
    say(f"hashes: {len(found)} files as recorded")
    return verdict(_measure(assets))


def _measure(assets: Path) -> dict[str, dict]:
    """The figures of every model, by name."""
    measured: dict[str, dict] = {}
    for name in TARGETS:
        measured[name] = measure.copy_accuracy(name, _target(name, assets))
        say(f"{name}: exact copies {measured[name]}")
    for name, plan in DRAFTS.items():
        measured[name] = measure.measure(
            name, _target(plan.target, assets), _draft(name, assets)
        )
        show(name, measured[name])
    return measured


def show(name: str, figures: dict[str, dict]) -> None:
    for label, figure in figures.items():
        say(f"{name}: accept length {figure['accept_length']:.2f} with {label}")


def verdict(measured: dict[str, dict]) -> int:
    wrong = [c for name in DRAFTS for c in measure.complaints(name, measured[name])]
    for complaint in wrong:
        say(complaint)
    say("outside the limits" if wrong else "all figures are within the limits")
    return 1 if wrong else 0


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def prepare(threads: int) -> None:
    """Make what follows the same from run to run."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
