"""Where the tiny trained models of this repository lie, and what a checkpoint needs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_pd.bed.errors import BedError

_REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class TinyModels:
    """Checkpoint folders of a target with two drafts, and of a pair that recalls a key
    from several hundred tokens before."""

    target: Path
    draft_full: Path
    draft_swa: Path
    recall_target: Path
    recall_draft: Path

    @classmethod
    def below(cls, root: Path) -> TinyModels:
        """The folders as `scripts/train_tiny_models.py` names them."""
        names = (
            "tiny-target",
            "tiny-draft-full",
            "tiny-draft-sliding",
            "tiny-target-recall",
            "tiny-draft-recall",
        )
        return cls(*(root / name for name in names))


MODELS = TinyModels.below(
    Path(os.environ.get("DSPARK_PD_ASSETS") or _REPOSITORY / "test" / "assets")
)


def check_checkpoint(path: Path, option: str) -> dict[str, Any]:
    """Parsed `config.json` of a checkpoint folder; BedError when it is not one."""
    config = path / "config.json"
    if not path.is_dir():
        raise _bad(option, path, "no such folder")
    if not config.is_file():
        raise _bad(option, path, "the folder has no config.json")
    if not any(path.glob("*.safetensors")):
        raise _bad(option, path, "the folder has no *.safetensors")
    try:
        found: dict[str, Any] = json.loads(config.read_text())
        return found
    except (ValueError, OSError) as error:
        raise _bad(option, path, f"config.json does not parse: {error}") from error


def check_draft(path: Path, option: str) -> int:
    """Gamma of a DSPARK draft checkpoint; BedError when it is something else."""
    config = check_checkpoint(path, option)
    architectures = config.get("architectures") or []
    if not any("dspark" in name.lower() for name in architectures):
        raise _bad(option, path, f"architectures {architectures} name no DSpark draft")
    gamma = config.get("dspark_block_size") or config.get("block_size")
    if not isinstance(gamma, int) or gamma < 1:
        raise _bad(option, path, "config.json gives no block size")
    return gamma


def _bad(option: str, path: Path, found: str) -> BedError:
    return BedError(
        f"{option} {path} is not a usable checkpoint",
        expected="a folder with config.json and *.safetensors",
        found=found,
        cause="a wrong path, or a checkout without test/assets",
        next_step="leave the option out for the shipped models, or correct the path",
        usage=True,
    )
