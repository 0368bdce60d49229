"""The doctor and the tail: it asks the overlay's table what an engine refuses to start with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark
from dspark_pd.doctor import tail
from dspark_pd.doctor.agreement import load_file
from outcome import Run

pytestmark = pytest.mark.unit

# A table with the interface of the overlay's, which is proved by its own tests.
TABLE = """
from __future__ import annotations
import dataclasses
from typing import Any

@dataclasses.dataclass(frozen=True)
class Refusal:
    code: str
    role: str
    applies: Any
    says: str
    fix: str

def facts_from(args, environ, target_config=None, draft_config=None, role="null"):
    configs = bool(target_config), bool(draft_config)
    return {**args, **environ, "role": role, "configs": configs}

REFUSALS = (
    Refusal("TAIL-X", "both", lambda f: f.get("pp_size") == 2, "{role} has 2", "have 1"),
    Refusal("TAIL-Y", "decode", lambda f: f["configs"] == (True, True), "read", "-"),
)

def refusals(facts):
    return [
        (r, r.says.format(**facts), r.fix)
        for r in REFUSALS
        if r.role in ("both", facts["role"]) and r.applies(facts)
    ]
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(TABLE)
    monkeypatch.setattr(tail, "load_refusals", lambda: load_file(path))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.usefixtures("table")
def test_a_refusal_at_start_up_is_an_error_that_names_its_engine(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    found = bench.findings(
        command(model, "prefill", "--pp-size 2"), command(model, "decode")
    )
    (finding,) = [f for f in found if f.code == "DOC-TAIL-X"]
    assert (finding.severity, finding.fix) == ("error", "have 1")
    assert finding.message == "prefill: prefill has 2"
    assert "refuses to start" in finding.consequence


@pytest.mark.usefixtures("table")
def test_the_table_gets_what_is_known_of_the_models(bench: Bench) -> None:
    model = bench.model("qwen", QWEN)
    decode = command(model, "decode", dspark(bench, DRAFT))
    assert "DOC-TAIL-Y" in bench.codes(command(model, "prefill"), decode)
    assert "DOC-TAIL-Y" not in bench.codes(
        command(model, "prefill"), command(model, "decode")
    )


@pytest.mark.usefixtures("table")
def test_a_running_engine_was_not_refused(bench: Bench, run: Run) -> None:
    info = {"pp_size": 2, "model_path": bench.model("qwen", QWEN), "version": "0.5.23"}
    saved = bench.file("info.json", json.dumps(info))
    outcome = run("doctor", "--prefill", saved, "--decode", saved)
    codes = [finding["code"] for finding in outcome.data["findings"]]
    assert "DOC-TAIL-X" not in codes


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("code", ["TAIL-X", "DOC-TAIL-X"])
def test_a_refusal_is_explained_under_both_names(run: Run, code: str) -> None:
    assert "have 1" in run("explain", code, text=True).out
