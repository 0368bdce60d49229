"""Pairs of engines that disagree, and how a client sees it.

A disagreement is asked for through a router, as a client would. What counts: the text
of the error, how long it took, that both engines stay healthy and that a good pair
that shares an engine with the bad one goes on serving.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from dspark_pd.bed import MODELS, Bed, Engine, EngineSpec, Router, RouterSpec
from dspark_pd.bed.bed import unhealthy as unhealthy_at_once
from dspark_pd.bed.ports import release_port

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80]
NEW_TOKENS = 4
LIMIT_S = 2.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Answer:
    """What a client got: HTTP status, body and seconds until it was there."""

    status: int | None
    body: str
    seconds: float

    @property
    def served(self) -> bool:
        if self.status != 200:
            return False
        return len(json.loads(self.body)["output_ids"]) == NEW_TOKENS


def ask(url: str, *, timeout_s: float = 30.0, **fields: object) -> Answer:
    """One request to a router; never raises for a refusal or a timeout."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, **fields}
    request = urllib.request.Request(
        f"{url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.monotonic()
    try:
        with _opener.open(request, timeout=timeout_s) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    except OSError as error:
        status, text = None, repr(error)
    return Answer(status, text, time.monotonic() - began)


@dataclass(frozen=True)
class Diagnosis:
    """What ``dspark-pd doctor`` said of two running engines."""

    works: bool
    codes: tuple[str, ...]


def consult_doctor(prefill: Engine, decode: Engine) -> Diagnosis:
    """Ask the doctor about a live pair, as an operator would."""
    urls = ["--prefill", prefill.url, "--decode", decode.url]
    done = subprocess.run(
        [sys.executable, "-m", "dspark_pd", "doctor", *urls, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    findings = json.loads(done.stdout)["data"]["findings"]
    return Diagnosis(done.returncode == 0, tuple(f["code"] for f in findings))


def route(bed: Bed, prefill: Engine, decode: Engine) -> Router:
    """A fresh router before a pair; routers stop using an engine after failures."""
    spec = RouterSpec(
        f"r-{prefill.name}-{decode.name}", [prefill.endpoint], [decode.endpoint]
    )
    return bed.start_router(spec)


def spec(name: str, role: str, draft: Path | None = MODELS.draft_full, **options):
    """An engine of the tiny target; `draft` None means no speculation."""
    return EngineSpec(name, role, MODELS.target, draft, **options)


def stop_and_free(bed: Bed, engine: Engine) -> dict[str, int | None]:
    """Stop an engine; the ports with which another one can take its place."""
    bed.stop(engine)
    for port in (engine.port, engine.bootstrap_port):
        if port is not None:
            release_port(port)
    return {"port": engine.port, "bootstrap_port": engine.bootstrap_port}


# -- drafts that differ -------------------------------------------------------------------


def draft_of_other_weights(folder: Path) -> Path:
    """The same configuration and shapes, other numbers."""
    return _rewrite(folder / "other-weights", lambda name, tensor: tensor * 1.25)


def draft_of_other_shape(folder: Path) -> Path:
    """The same draft with its last layer taken off."""
    layers = json.loads((MODELS.draft_full / "config.json").read_text())
    last = layers["num_hidden_layers"] - 1

    def keep(name, tensor):
        return None if f"layers.{last}." in name else tensor

    return _rewrite(folder / "other-shape", keep, num_hidden_layers=last)


def _rewrite(folder: Path, change, **config: object) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODELS.draft_full, folder)
    path = folder / "config.json"
    document = json.loads(path.read_text()) | config
    types = document.get("layer_types")
    if types:
        document["layer_types"] = types[: document["num_hidden_layers"]]
    path.write_text(json.dumps(document))
    for file in folder.glob("*.safetensors"):
        changed = {n: change(n, tensor) for n, tensor in load_file(file).items()}
        kept = {n: t.contiguous() for n, t in changed.items() if t is not None}
        save_file(kept, file, metadata={"format": "pt"})
    return folder


# -- engines without parts of the set -----------------------------------------------------


def tree_with(folder: Path, *components: str) -> Path:
    """A copy of this environment's SGLang with only the given components applied."""
    installed = Path(importlib.util.find_spec("sglang").origin).parent.parent
    folder.mkdir(parents=True)
    shutil.copytree(installed / "sglang", folder / "sglang", symlinks=True)
    for record in installed.glob("sglang-*.dist-info"):
        shutil.copytree(record, folder / record.name)
    tool = [sys.executable, "-m", "dspark_pd"]
    target = ["--target", str(folder), "-q"]
    subprocess.run([*tool, "revert", *target], check=True, timeout=120)
    chosen = [word for name in components for word in ("--component", name)]
    subprocess.run([*tool, "apply", *target, *chosen], check=True, timeout=120)
    return folder


def running_from(tree: Path) -> dict[str, str]:
    """Environment of an engine that uses the SGLang of `tree`."""
    return {"PYTHONPATH": str(tree)}


def unhealthy(*engines: Engine, timeout_s: float = 30.0) -> list[str]:
    """Names of the engines that do not become healthy in time.

    ``/health`` makes a token, which takes seconds on a busy machine, so one miss
    does not count.
    """
    end = time.monotonic() + timeout_s
    sick = list(engines)
    while sick:
        sick = unhealthy_at_once(sick)
        if time.monotonic() > end or any(not engine.alive() for engine in sick):
            break
    return [engine.name for engine in sick]
