"""Train the tiny models, or check the ones that are there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from . import files, measure
from .models import Draft, Shape, Target
from .recipe import DRAFTS, SEED, TARGET, as_dict
from .training import draft_loss, target_loss, train

TARGET_DIR = "tiny-target"
#: Folder and window of each draft. None is full attention.
WINDOWS = {"tiny-draft-full": None, "tiny-draft-sliding": 32}


def say(text: str) -> None:
    print(text, flush=True)


def build(out: Path) -> int:
    """Train everything into `out`; -> exit code."""
    cpu_seconds: dict[str, int] = {}
    began = time.process_time()
    target = train_target()
    cpu_seconds[TARGET_DIR] = round(time.process_time() - began)
    folder = out / TARGET_DIR
    files.write_checkpoint(target, files.target_config(target), folder)
    files.write_tokenizer(folder)
    measured: dict[str, dict] = {TARGET_DIR: measure.copy_accuracy(target)}
    say(f"{TARGET_DIR}: exact copies {measured[TARGET_DIR]}")
    for name, window in WINDOWS.items():
        began = time.process_time()
        draft = train_draft(name, target, window)
        cpu_seconds[name] = round(time.process_time() - began)
        files.write_checkpoint(draft, files.draft_config(draft, target), out / name)
        measured[name] = measure.measure(target, draft)
        show(name, measured[name])
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


def train_target() -> Target:
    torch.manual_seed(SEED)
    target = Target(Shape(layers=4))
    say(f"{TARGET_DIR}: {parameters(target)} parameters; figure: copy accuracy")
    train(target, target_loss(target), TARGET, SEED, say)
    files.round_weights(target)
    return target.requires_grad_(False)


def train_draft(name: str, target: Target, window: int | None) -> Draft:
    torch.manual_seed(SEED + 1)
    draft = Draft(Shape(layers=2), window)
    say(f"{name}: {parameters(draft)} parameters; figure: accept length of blocks")
    recipe = DRAFTS[name]
    loss = draft_loss(target, draft, recipe.anchors)
    train(draft, loss, recipe, SEED + 1, say)
    files.round_weights(draft)
    return draft.requires_grad_(False)


def check(assets: Path) -> int:
    """Hashes against the manifest, then the figures against the limits."""
    manifest = json.loads((assets / files.MANIFEST).read_text(encoding="utf-8"))
    found = files.file_record(assets)
    recorded = manifest["files"]
    names = found.keys() | recorded.keys()
    wrong = sorted(n for n in names if found.get(n) != recorded.get(n))
    for name in wrong:
        say(f"{name}: expected {recorded.get(name)}, found {found.get(name)}")
    if wrong:
        say("The manifest and the files disagree; train again or restore them.")
        return 1
    say(f"hashes: {len(found)} files as recorded")
    target = Target(Shape(layers=4))
    files.read_checkpoint(target, assets / TARGET_DIR)
    measured = {TARGET_DIR: measure.copy_accuracy(target)}
    say(f"{TARGET_DIR}: exact copies {measured[TARGET_DIR]}")
    for name, window in WINDOWS.items():
        draft = Draft(Shape(layers=2), window)
        files.read_checkpoint(draft, assets / name)
        measured[name] = measure.measure(target, draft)
        show(name, measured[name])
    return verdict(measured)


def show(name: str, figures: dict[str, dict]) -> None:
    for label, figure in figures.items():
        say(f"{name}: accept length {figure['accept_length']:.2f} with {label}")


def verdict(measured: dict[str, dict]) -> int:
    wrong = [c for name in WINDOWS for c in measure.complaints(name, measured[name])]
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
