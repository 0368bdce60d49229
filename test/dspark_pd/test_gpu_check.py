"""The list for a GPU machine: what a CPU can test of it, which is all but the engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bed_fakes import use_fake_servers
from dspark_pd.bed import checks, gpu_check
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.specs import to_argv

pytestmark = pytest.mark.unit

ALL = [check for wave in gpu_check.WAVES for check in wave.checks]


def test_every_check_uses_engines_of_its_wave() -> None:
    for wave in gpu_check.WAVES:
        for check in wave.checks:
            named = {*check.pair, check.reference}
            named |= {check.log[0]} if check.log else set()
            assert named <= set(wave.engines)


def test_flags_of_a_gpu_reach_its_engines_and_no_cpu() -> None:
    tail = gpu_check.WAVES[1]
    on_gpu = {s.name: s.flags(1, 2) for s in gpu_check.specs(tail, "cuda")}
    assert on_gpu["tail-graphs"]["cuda-graph-backend-prefill"] == "breakable"
    assert on_gpu["tail-eager"]["disable-prefill-cuda-graph"] is True
    assert on_gpu["tail-eager"]["max-running-requests"] is None
    on_cpu = {s.name: s.flags(1, 2) for s in gpu_check.specs(tail, "cpu")}
    assert on_cpu["tail-eager"]["max-running-requests"] == 16
    assert "cuda-graph-backend-prefill" not in on_cpu["tail-graphs"]


def test_retraction_uses_the_default_backup_on_a_gpu() -> None:
    [*_, small] = gpu_check.specs(gpu_check.WAVES[2], "cuda")
    argv = to_argv(small.flags(1, None))
    assert "--disaggregation-decode-retraction-backup" not in argv
    assert argv[argv.index("--max-total-tokens") + 1] == "640"


def test_engines_of_a_wave_fit_on_one_gpu() -> None:
    for wave in gpu_check.WAVES:
        flags = [spec.flags(1, 2) for spec in gpu_check.specs(wave, "cuda")]
        assert sum(f["mem-fraction-static"] for f in flags) < 0.9  # type: ignore[misc]


def found(holds: bool = True) -> dict[str, Any]:
    rows = [{"assert": "ratio>=0.9", "found": 0.5, "holds": holds}]
    return {"asserts": rows, "accept_length": 4.0, "ratio": 0.5, "same_text": 1.0}


def test_a_check_fails_by_an_assert_or_by_the_log() -> None:
    check = next(check for check in ALL if check.log)
    words = (
        "DSpark handoff: 17 requests of 0.05 MiB are 1 MiB of host memory for this rank"
    )
    assert gpu_check.judge(check, found(), lambda name: words) == ""
    assert "has no" in gpu_check.judge(check, found(), lambda name: "nothing")
    assert "ratio>=0.9" in gpu_check.judge(check, found(False), lambda name: words)


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that has all, and servers that answer and are no engines."""
    use_fake_servers(monkeypatch, tmp_path)
    versions = dict.fromkeys(checks._NEEDED, "0.5.23")
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    monkeypatch.setattr(checks, "check_applied", lambda device: None)
    monkeypatch.setenv("DSPARK_PD_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path / "report.json"


def test_one_report_has_all_checks(
    ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "measure", lambda *_: found())
    assert gpu_check.main(["--device", "cpu", "--json", str(ready)]) == 1
    report = json.loads(ready.read_text())
    assert (report["device"], report["planned"], len(report["checks"])) == ("cpu", 7, 7)
    # The fakes log nothing of an engine's.
    failed = [check["number"] for check in report["checks"] if not check["passed"]]
    assert failed == [6, 7]
    assert report["passed"] == 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok   1  engines start and serve")
    assert lines[6].startswith("FAIL 7  native, retraction")


def test_a_list_whose_report_cannot_be_written_says_so(
    ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "measure", lambda *_: found())
    assert gpu_check.main(["--device", "cpu", "--json", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("ok   1  engines start and serve")
    assert "gpu_check: --json /dev/full was not written" in said.err
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--json", str(ready.parent)])
    assert "is a folder" in capsys.readouterr().err


def test_engines_that_do_not_start_fail_their_checks_and_no_others(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "measure", lambda *_: found())
    start = gpu_check.Bed.start

    def broken(self: Any, specs: Any) -> Any:
        if any(spec.name == "tail-eager" for spec in specs):
            raise BedError("tail-eager ended while it started")
        return start(self, specs)

    monkeypatch.setattr(gpu_check.Bed, "start", broken)
    assert gpu_check.main(["--device", "cpu", "--json", str(ready)]) == 1
    rows = json.loads(ready.read_text())["checks"]
    assert [row["passed"] for row in rows] == [True] * 3 + [False] * 4
    assert "did not start" in rows[3]["found"]


def test_a_missing_package_is_named_with_its_command(
    ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {**dict.fromkeys(checks._NEEDED, "0.5.23"), "nixl": None}
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    assert gpu_check.main(["--json", str(ready)]) == 2
    assert "pip install nixl" in capsys.readouterr().err


def test_a_gpu_needs_no_cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(checks._NEEDED, "0.5.20")
    versions |= {"sglang-cpu-reference": None, "nixl-cu13": None}
    monkeypatch.setattr(checks, "_probe", lambda: versions)
    assert checks.check_installed("cuda").sglang == "0.5.20"
    with pytest.raises(BedError, match="NIXL library wheel"):
        checks.check_installed("cpu")
