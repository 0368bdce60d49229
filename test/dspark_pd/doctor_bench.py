"""Models, argument files and pairs of engines for tests of the doctor."""

from __future__ import annotations

import json
from pathlib import Path

from dspark_pd.doctor.engine import Engine, Finding
from dspark_pd.doctor.sources import read_engine
from dspark_pd.verbs.doctor import diagnose

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
DRAFT = {
    **QWEN,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "dflash_config": {"target_layer_ids": [0, 1, 2]},
}


class Bench:
    """Writes models and argument files below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, name: str, config: dict) -> str:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    def file(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def engine(self, role: str, text: str) -> Engine:
        return read_engine(role, self.file(f"{role}.args", text), 1.0)

    def findings(self, prefill: str, decode: str) -> list[Finding]:
        return diagnose(self.engine("prefill", prefill), self.engine("decode", decode))

    def codes(self, prefill: str, decode: str) -> list[str]:
        return [finding.code for finding in self.findings(prefill, decode)]


def command(model: str, role: str, *flags: str, env: str = "") -> str:
    """A launch command with the time limits that the doctor wants."""
    env = f"SGLANG_TIMEOUT_KEEP_ALIVE=60 {env}"
    if role == "prefill":
        env = f"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=30 {env}"
    return (
        f"{env} sglang serve --model-path {model} --disaggregation-mode {role} "
        f"--disaggregation-transfer-backend nixl {' '.join(flags)}"
    )


def dspark(bench: Bench, config: dict = DRAFT, name: str = "draft") -> str:
    path = bench.model(name, config)
    return f"--speculative-algorithm DSPARK --speculative-draft-model-path {path}"
