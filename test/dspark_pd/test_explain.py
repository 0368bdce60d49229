"""``explain``: one name, all that is known of it."""

from __future__ import annotations

import pytest

from dspark_pd.doctor.checks import CHECKS
from dspark_pd.doctor.remarks import REMARKS
from dspark_pd.doctor.tables import load
from dspark_pd.measure.diagnosis import CAUSES
from dspark_pd.messages.errors import catalogue
from dspark_pd.patchset.patch_set import load_patch_set
from outcome import Run

pytestmark = pytest.mark.unit


def test_a_hunk_is_explained_by_its_record(run: Run) -> None:
    shown = run("explain", "start.check-settings", text=True).out
    for text in (
        "Check the settings before anything starts",
        "Made up for a test.",
        "srt/start.py",
        "agreement (fix)",
        ">=1.0.0,<1.2.0",
        "symbol: srt/start.py::check",
        "test_apply_inserts_our_lines",
        "https://github.com/sgl-project/sglang/issues/1",
    ):
        assert text in shown


def test_all_variants_of_a_hunk_are_explained(run: Run) -> None:
    shown = run("explain", "relay.keep-input", text=True).out
    assert ">=1.1.0,<1.3.0" in shown and ">=1.0.0,<1.1.0" in shown


@pytest.mark.parametrize("code", ["H301", "h301"])
def test_an_error_is_explained_with_made_up_values(run: Run, code: str) -> None:
    shown = run("explain", code, text=True).out
    assert shown.startswith("error[H301] relay.keep-input: expected 1 match, found 2\n")
    assert "exit     4" in shown and "made up" in shown


def test_every_code_has_an_explanation(run: Run) -> None:
    rules = load("rules")
    codes = [rule.code for rule in (*rules.ENGINE_RULES, *rules.DRAFT_RULES)]
    codes += [check.code for check in CHECKS]
    codes += [remark.code for remark in REMARKS.values()]
    codes += ["PD-MALFORMED", *catalogue(), *CAUSES]
    for code in dict.fromkeys(codes):
        (first, *_) = run("explain", code).data["explained"]
        assert code in first[0] and len(first) > 2, code


def test_every_hunk_of_the_set_has_an_explanation(run: Run) -> None:
    patch_set = load_patch_set()
    for identity in patch_set.identities:
        outcome = run("explain", identity, "--overlay", patch_set.overlay)
        assert len(outcome.data["explained"]) == len(patch_set.identities[identity])


@pytest.mark.parametrize(
    ("name", "near"),
    [("relay.keep-inptu", "relay.keep-input"), ("H3O1", "H301"), ("PD-TP1", "PD-TP")],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    run: Run, name: str, near: str
) -> None:
    outcome = run("explain", name)
    assert (outcome.code, outcome.codes) == (2, ["U002"])
    assert "dspark-pd list --errors" in outcome.document["errors"][0]["next"]
    assert near in outcome.document["errors"][0]["expected"].replace(",", "").split()
