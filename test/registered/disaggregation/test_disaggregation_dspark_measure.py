"""``dspark-pd measure`` on real pairs: no loss where there is none, and each cause by name.

Every fault is made: a prefill without the draft, alone and beside a good one; a draft whose
weights are wrong; HiCache entries that were stored with it. The client's own
rules, and input that real servers do not give on demand, are in
``test/dspark_pd/test_measure.py``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pd_prompts import PAGE

from dspark_pd.bed import (
    MODELS,
    Bed,
    Client,
    Engine,
    EngineSpec,
    Router,
    RouterSpec,
    web,
)
from dspark_pd.bed.prompts import Prompt, make_prompts
from dspark_pd.bed.serve import HICACHE, STORAGE_DIR_ENV

pytestmark = pytest.mark.e2e

NEW_TOKENS = 48
STORAGE_DEADLINE_S = 30.0
# What fits in device memory beside one set of prompts: fillers push the others out.
DEVICE_TOKENS = 16 * PAGE


def prompts(seed: int, count: int = 2) -> list[Prompt]:
    return make_prompts(
        count,
        seed=seed,
        key_len=(14, 23),
        prompt_tokens=(4 * PAGE + 8, 5 * PAGE - 8),
    )


def written(folder: Path, chosen: Sequence[Prompt]) -> Path:
    """A file for --prompts."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": p.text}) + "\n" for p in chosen))
    return path


def measure(url: str, *options: object, code: int = 0) -> dict[str, Any]:
    """Run the command as an operator does; its JSON."""
    command = [sys.executable, "-m", "dspark_pd", "measure", "--url", url, "--json"]
    command += ["--new-tokens", NEW_TOKENS, "--prompt-length", 96, "-q"]
    # One at a time: batches are not the same on both sides.
    command += ["--concurrency", 1, *options]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)["data"]


def causes(found: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in found["findings"]]


def ratios(found: dict[str, Any], group: str) -> dict[str, float]:
    """Of the figures that have one: the reference may need fewer steps."""
    figures = found[f"by_{group}"].items()
    return {name: figure["ratio"] for name, figure in figures if "ratio" in figure}


@dataclass(frozen=True)
class Fleet:
    """A good prefill and one without the draft, which share their storage."""

    unified: Engine
    good: Engine
    cold: Engine
    decode: Engine
    storage: Path
    router: Router
    cold_router: Router
    both_router: Router


@pytest.fixture(scope="module")
def fleet(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    storage = tmp_path_factory.mktemp("storage")
    model, draft = MODELS.target, MODELS.draft_full
    kept = hicache(storage)
    env = {"SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "1"}
    engines = bed.start(
        [
            EngineSpec("measure-u", "unified", model, draft),
            EngineSpec("measure-p", "prefill", model, draft, **kept),
            EngineSpec("measure-cold-p", "prefill", model, **kept),
            EngineSpec(
                "measure-d",
                "decode",
                model,
                draft,
                page_size=PAGE,
                args={"enable-metrics": True},
                env=env,
            ),
        ]
    )
    unified, good, cold, decode = engines
    routers = bed.start_routers(
        [
            RouterSpec(f"measure-r{n}", [p.endpoint for p in chosen], [decode.endpoint])
            for n, chosen in enumerate(([good], [cold], [good, cold]))
        ]
    )
    yield Fleet(unified, good, cold, decode, storage, *routers)
    bed.stop(*routers, *engines)


@dataclass(frozen=True)
class Bad:
    """A pair and a server whose draft is wrong; the pair stores where the good one does."""

    unified: Engine
    router: Router


@pytest.fixture(scope="module")
def bad(
    bed: Bed, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bad]:
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("bad") / "draft"
    shutil.copytree(MODELS.draft_full, folder)
    for file in folder.glob("*.safetensors"):
        # Other signs: the shapes of a draft, and nothing that it was trained to do.
        wrong = {name: -tensor for name, tensor in load_file(file).items()}
        save_file(wrong, file, metadata={"format": "pt"})
    engines = bed.start(
        [
            EngineSpec("bad-u", "unified", MODELS.target, folder),
            EngineSpec(
                "bad-p", "prefill", MODELS.target, folder, **hicache(fleet.storage)
            ),
            EngineSpec("bad-d", "decode", MODELS.target, folder, page_size=PAGE),
        ]
    )
    unified, prefill, decode = engines
    router = bed.start_router(
        RouterSpec("bad-r", [prefill.endpoint], [decode.endpoint])
    )
    yield Bad(unified, router)
    bed.stop(router, *engines)


def hicache(storage: Path) -> dict[str, Any]:
    args = {"max-total-tokens": DEVICE_TOKENS, "enable-metrics": True, **HICACHE}
    env = {STORAGE_DIR_ENV: str(storage)}
    return {"page_size": PAGE, "args": args, "env": env}


def wait_for_files(storage: Path, at_least: int) -> None:
    """Files are written behind the request; they are there when no more are added."""
    deadline, seen = time.monotonic() + STORAGE_DEADLINE_S, -1
    while time.monotonic() < deadline:
        count = sum(1 for path in storage.rglob("*") if path.is_file())
        if count >= at_least and count == seen:
            return
        seen = count
        time.sleep(0.5)
    raise AssertionError(f"{seen} files in {storage}, expected at least {at_least}")


@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_native_loses_nothing_at_any_step(fleet: Fleet, endpoint: str) -> None:
    found = measure(
        fleet.router.url,
        *("--reference", fleet.unified.url, "--requests", 6, "--seed", 1),
        *("--endpoint", endpoint),
        *("--assert", "ratio==1", "--assert", "ratio.step==1"),
    )
    assert causes(found) == []
    assert found["same_text"] == 1
    assert len(found["by_step"]) >= 8
    # On a busy machine some replies come with merged events.
    assert found["unread_steps"] < found["requests"]
    assert found["accept_length"] > 3.5
    assert list(found["by_prefill"]) == [fleet.good.url]


def test_every_tier_loses_nothing(fleet: Fleet, tmp_path: Path) -> None:
    chosen = prompts(101)
    path = written(tmp_path, chosen)
    options = ["--reference", fleet.unified.url, "--prompts", path]
    options += ["--assert", "ratio.tier==1"]
    first = measure(fleet.router.url, *options, "--repeat", 2)
    assert set(first["by_tier"]) == {"cold", "device"}
    direct = Client.router(fleet.router)
    direct.generate([p.ids for p in prompts(102, 4)], 2, parallel=1)
    host = measure(fleet.router.url, *options)
    assert set(host["by_tier"]) == {"host"}
    # Target and draft are files of their own: two per page and prompt.
    wait_for_files(fleet.storage, 2 * 4 * len(chosen))
    fleet.good.flush_cache()
    storage = measure(fleet.router.url, *options)
    assert set(storage["by_tier"]) == {"storage"}
    assert [causes(found) for found in (first, host, storage)] == [[], [], []]


def test_no_context_is_told_by_the_first_steps(fleet: Fleet) -> None:
    found = measure(
        fleet.cold_router.url,
        *("--reference", fleet.unified.url, "--requests", 6, "--seed", 2),
        *("--assert", "ratio>=0.98"),
        code=1,
    )
    assert causes(found) == ["MEASURE-HANDOFF"]
    by_step = ratios(found, "step")
    assert max(by_step[str(n)] for n in range(1, 6)) < 0.4
    assert found["same_text"] == 1


def test_one_cold_prefill_of_two_is_named(fleet: Fleet) -> None:
    found = measure(
        fleet.both_router.url,
        *("--reference", fleet.unified.url, "--requests", 4, "--seed", 3),
        "--each-prefill",
    )
    assert causes(found) == ["MEASURE-ONE-PREFILL"]
    assert fleet.cold.url in found["findings"][0]["cause"]
    by_prefill = ratios(found, "prefill")
    assert by_prefill[fleet.good.url] == 1
    assert by_prefill[fleet.cold.url] < 0.7


def test_entries_stored_without_the_draft_are_not_read(
    fleet: Fleet, tmp_path: Path
) -> None:
    """SGLang computes such a prompt anew: there is no loss to be told."""
    stored = prompts(103)
    put_into_storage(fleet, fleet.cold_router, stored, files=4 * len(stored))
    found = measure_stored(fleet, written(tmp_path, stored))
    assert set(found["by_tier"]) == {"cold"}
    assert (causes(found), found["ratio"]) == ([], 1)


def test_entries_of_another_draft_are_told(
    fleet: Fleet, bad: Bad, tmp_path: Path
) -> None:
    """The storage does not tell drafts apart: theirs are read, and they are no use."""
    stored, fresh = prompts(104), prompts(105)
    put_into_storage(fleet, bad.router, stored, files=2 * 4 * len(stored))
    found = measure_stored(fleet, written(tmp_path, [*stored, *fresh]))
    assert set(found["by_tier"]) == {"cold", "storage"}
    assert causes(found) == ["MEASURE-STORAGE-WITHOUT-DRAFT"]
    by_tier = ratios(found, "tier")
    assert by_tier["cold"] == 1
    assert by_tier["storage"] < 0.7


def put_into_storage(
    fleet: Fleet, router: Router, chosen: Sequence[Prompt], files: int
) -> None:
    before = sum(1 for path in fleet.storage.rglob("*") if path.is_file())
    Client.router(router).generate([p.ids for p in chosen], 2, parallel=1)
    wait_for_files(fleet.storage, before + files)


def measure_stored(fleet: Fleet, path: Path) -> dict[str, Any]:
    return measure(
        fleet.router.url,
        *("--reference", fleet.unified.url, "--prompts", path),
    )


def test_a_bad_draft_is_not_blamed_on_the_split(bad: Bad) -> None:
    found = measure(
        bad.router.url, "--reference", bad.unified.url, "--requests", 4, "--seed", 4
    )
    assert causes(found) == ["MEASURE-DRAFT"]
    assert found["ratio"] == 1


DASHBOARD = Path(__file__).resolve().parents[3] / "docs_new/grafana/dspark_pd.json"
# Prometheus adds it when it reads a target; it is no label of the engines.
OWN_LABELS = {"instance"}
# A counter is not there before it has counted.
RARE = {
    "sglang:num_bootstrap_failed_reqs_total",
    "sglang:num_transfer_failed_reqs_total",
}


def test_the_dashboard_asks_for_what_engines_publish(fleet: Fleet) -> None:
    """Every metric of every query is there, with every label that it is summed by."""
    client, [prompt] = Client.router(fleet.router), prompts(106, 1)
    for _ in range(2):  # The second one is cached.
        client.generate([prompt.ids], NEW_TOKENS)
    published: dict[str, set[str]] = {}
    for engine in (fleet.good, fleet.decode):
        page = web.open_url(f"{engine.url}/metrics").read().decode()
        for name, labels in re.findall(r"^(sglang:\w+)(?:{(.*)})? ", page, re.M):
            found = set(re.findall(r'(\w+)="', labels))
            published[name] = published.get(name, set()) | found
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 10
    for query in queries:
        names = set(re.findall(r"sglang:\w+", query))
        assert names - RARE <= set(published), query
        for by in re.findall(r"by \(([^)]*)\)", query):
            wanted = set(by.replace(" ", "").split(",")) - OWN_LABELS
            for name in names - RARE:
                assert wanted <= published[name], (query, name)
    spec = importlib.util.find_spec("sglang.srt.observability.metrics_collector")
    source = Path(spec.origin).read_text()
    assert [name for name in RARE if f'name="{name}"' not in source] == []
