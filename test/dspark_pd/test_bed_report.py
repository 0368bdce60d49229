"""Report, modes and claims of the demo: each claim can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dspark_pd.bed import modes
from dspark_pd.bed.client import Reply
from dspark_pd.bed.report import Report, Run

pytestmark = pytest.mark.unit

MODES = {mode.key: mode for wave in modes.WAVES for mode in wave.modes}


def reply(tokens: int, steps: int, first: int = 7) -> Reply:
    meta = {"prompt_tokens": 5, "completion_tokens": tokens}
    if steps:
        meta["spec_verify_ct"] = steps
    sizes = [1] * steps
    if steps:
        sizes[0] += tokens - 1 - steps
    return Reply(tuple(range(first, first + tokens)), meta, steps=tuple(sizes))


def run(key: str, steps: tuple[int, ...], bytes_moved: int = 0, first: int = 7) -> Run:
    replies = tuple(reply(20, count, first) for count in steps)
    return Run(MODES[key], replies, bytes_moved, 1.0)


def good() -> dict[str, Run]:
    return {
        "no-spec": run("no-spec", (0, 0)),
        "unified": run("unified", (5, 4)),
        "pd-native": run("pd-native", (5, 4), 1000),
        "pd-no-context": run("pd-no-context", (19, 18), 500),
    }


def report(runs: dict[str, Run]) -> Report:
    return Report("0.5.23", 4, tuple(runs.values()))


def failed(runs: dict[str, Run]) -> list[str]:
    return [claim.text for claim in report(runs).claims() if not claim.holds]


def test_json_has_the_published_shape() -> None:
    found = report(good()).as_json()
    keys = {"schema", "sglang", "device", "transfer_backend", "gamma", "runs", "parity"}
    assert set(found) == keys
    assert (found["schema"], found["gamma"]) == (1, 4)
    native = found["runs"][2]
    assert set(native) == {
        "mode",
        "pp",
        "tp",
        "overlap",
        "requests",
        "accept_length",
        "accept_length_by_step",
        "target_steps_per_token",
        "bytes_moved",
    }
    assert (native["mode"], native["pp"], native["tp"]) == ("pd-native", 1, 1)
    assert native["bytes_moved"] == 1000
    assert native["accept_length"] == pytest.approx(40 / 9)
    assert native["target_steps_per_token"] == pytest.approx(9 / 40)
    assert native["requests"][1] == {
        "id": "prompt-1",
        "prompt_tokens": 5,
        "completion_tokens": 20,
        "output_sha256": reply(20, 4).sha256,
        "verify_steps": 4,
        "accept_length": 5.0,
    }
    assert set(found["parity"]) == {"pd-native", "pd-no-context"}
    assert found["parity"]["pd-native"] == {
        "identical_outputs": True,
        "accept_length_ratio": 1.0,
    }


def test_without_speculation_there_is_no_accept_length() -> None:
    no_spec = report(good()).as_json()["runs"][0]
    assert no_spec["accept_length"] is None
    assert no_spec["target_steps_per_token"] == 1.0
    assert no_spec["requests"][0]["verify_steps"] == 0


def test_all_claims_hold_on_a_good_run() -> None:
    assert failed(good()) == []
    assert len(report(good()).claims()) == 8


@pytest.mark.parametrize(
    ("key", "bad", "text"),
    [
        ("no-spec", run("no-spec", (0, 0), first=8), "no-spec: every output"),
        ("unified", run("unified", (8, 8)), ">= 3.5"),
        ("pd-native", run("pd-native", (4, 5), 10), "verify steps of every request"),
        ("pd-native", run("pd-native", (5, 4), 0), "NIXL moved 0 bytes"),
        ("pd-native", run("pd-native", (5, 4), 9, first=8), "pd-native: every output"),
        ("pd-no-context", run("pd-no-context", (9, 9), 9), "<= 1.6"),
        ("pd-no-context", run("pd-no-context", (0, 0), 9), "<= 1.6"),
    ],
)
def test_each_claim_can_fail(key: str, bad: Run, text: str) -> None:
    """Equal means are not enough either: (4, 5) against (5, 4) fails."""
    assert any(text in claim for claim in failed({**good(), key: bad}))


def test_table_marks_the_reference_and_a_difference() -> None:
    runs = {**good(), "pd-native": run("pd-native", (5, 4), 9, first=8)}
    rows = {line.split()[0]: line for line in report(runs).table().splitlines()}
    assert "reference" in rows["unified"]
    assert " NO " in rows["pd-native"]
    assert " yes " in rows["no-spec"]
    assert "4.44" in rows["unified"]


def test_a_new_mode_needs_no_new_code() -> None:
    tail = replace(MODES["pd-native"], key="pd-tail-pp2", name="pd-tail", pp=2)
    runs = {**good(), tail.key: replace(good()["pd-native"], mode=tail)}
    found = report(runs).as_json()
    assert (found["runs"][-1]["mode"], found["runs"][-1]["pp"]) == ("pd-tail", 2)
    assert found["parity"]["pd-tail-pp2"]["accept_length_ratio"] == 1.0


def test_choosing_modes_keeps_the_reference() -> None:
    waves = modes.choose(["pd-native"])
    assert [mode.key for wave in waves for mode in wave.modes] == [
        "unified",
        "pd-native",
    ]
    assert waves[1].engines == ("prefill", "decode")
    with pytest.raises(KeyError, match="no-such"):
        modes.choose(["no-such"])


def test_the_digest_tells_outputs_apart() -> None:
    assert reply(20, 5).sha256 == reply(20, 4).sha256
    assert reply(20, 5).sha256 != reply(20, 5, first=8).sha256


def test_steps_have_a_table_of_their_own() -> None:
    """Where the loss is: a mean hides it."""
    head, _, *rows = report(good()).step_table().splitlines()
    assert head.split()[-8:] == [str(n) for n in range(1, 9)]
    # No speculation, no row. The first step has what the others do not: 15 and 16 tokens,
    # in the last row 1 and 2.
    assert [row.split()[:3] for row in rows] == [
        ["unified", "15.50", "1.00"],
        ["pd-native", "15.50", "1.00"],
        ["pd-no-context", "1.50", "1.00"],
    ]
    assert rows[0].split()[-1] == "-"


def without_steps(run: Run, index: int) -> Run:
    """The run with the events of one reply merged."""
    replies = list(run.replies)
    replies[index] = replace(replies[index], steps=None)
    return replace(run, replies=tuple(replies))


def test_rows_of_steps_are_of_the_same_requests() -> None:
    """One request has 16 tokens in its first step, the other 15; neither run loses any."""
    runs = good()
    runs["pd-native"] = without_steps(runs["pd-native"], 1)
    _, _, *rows, first, second = report(runs).step_table().splitlines()
    assert [row.split()[:2] for row in rows] == [
        ["unified", "15.00"],
        ["pd-native", "15.00"],
        ["pd-no-context", "1.00"],
    ]
    assert first.startswith("1 of 2 requests are left out of every row")
    assert first.endswith("compared with unified:") and "merged" in second
    in_json = {run["mode"]: run for run in report(runs).as_json()["runs"]}
    for mode in ("unified", "pd-native"):
        assert in_json[mode]["accept_length_by_step"]["1"] == 15.0


def test_without_a_common_request_no_step_is_compared() -> None:
    runs = good()
    runs["unified"] = without_steps(runs["unified"], 0)
    runs["pd-native"] = without_steps(runs["pd-native"], 1)
    table = report(runs).step_table()
    assert "15.00" not in table and "16.00" not in table
    assert "2 of 2 requests are left out" in table
    runs = report(runs).as_json()["runs"]
    assert [run["accept_length_by_step"] for run in runs] == [{}] * 4


def test_merged_events_of_another_reference_leave_nothing_out() -> None:
    sliding = replace(good()["unified"], mode=MODES["unified-sliding"])
    runs = {**good(), "unified-sliding": without_steps(sliding, 0)}
    table = report(runs).step_table()
    assert "unified          " in table and "15.50" in table
    assert "every row compared with unified-sliding:" in table.replace("\n", " ")
    assert "every row compared with unified:" not in table.replace("\n", " ")


def failed_on_cuda(runs: dict[str, Run]) -> list[str]:
    found = replace(report(runs), device="cuda")
    return [claim.text for claim in found.claims() if not claim.holds]


def test_on_a_gpu_texts_and_steps_may_differ_within_a_band() -> None:
    runs = good()
    runs["unified"] = run("unified", (5, 6))
    runs["pd-native"] = run("pd-native", (6, 6), 0, first=9)
    assert failed_on_cuda(runs) == []
    assert failed(runs) != []
    runs["pd-native"] = run("pd-native", (9, 8))
    assert [text.partition(":")[0] for text in failed_on_cuda(runs)] == ["pd-native"]
    runs["pd-native"], runs["unified"] = (
        run("pd-native", (9, 9)),
        run("unified", (9, 9)),
    )
    assert [text.partition(":")[0] for text in failed_on_cuda(runs)] == ["unified"]
    assert "1,000" not in replace(report(good()), device="cuda").table()


def test_on_a_gpu_engines_share_it_and_know_no_cpu_platform(tmp_path: Path) -> None:
    pair = modes.Pair(tmp_path, tmp_path, tmp_path)
    [wave] = modes.on_device(modes.choose(["pd-native"])[1:], "cuda")
    for spec in modes.specs(wave, pair, "cuda"):
        flags = spec.flags(1, 2)
        assert flags["dtype"] == "bfloat16"
        assert flags["mem-fraction-static"] * len(wave.engines) < 0.9
        environ = spec.environment(tmp_path)
        assert not {"SGLANG_PLATFORM", "SGLANG_CPU_REFERENCE_STATS_DIR"} & set(environ)


def test_one_gpu_runs_no_pipeline() -> None:
    waves = modes.on_device(modes.choose(None), "cuda")
    keys = [mode.key for wave in waves for mode in wave.modes]
    assert "pd-tail-pp1" in keys
    assert "pd-tail-pp2" not in keys
    assert modes.on_device(modes.choose(None), "cpu") == modes.choose(None)
