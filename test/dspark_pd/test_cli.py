"""The command line: exit codes, JSON, quiet and verbose, what it costs to start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.cli import build_parser, main
from dspark_pd.messages import exit_codes
from outcome import Run

pytestmark = pytest.mark.unit

ENVELOPE = {
    "schema",
    "tool",
    "command",
    "status",
    "exit_code",
    "target",
    "data",
    "notes",
    "errors",
}
REPOSITORY = Path(__file__).resolve().parents[2]
MAX_START_S = 0.3


def test_exit_codes_are_those_of_the_help_and_the_docs() -> None:
    constants = {
        value
        for name, value in vars(exit_codes).items()
        if name.isupper() and isinstance(value, int)
    }
    assert constants == set(exit_codes.MEANINGS) == {*range(8), 130}
    text = build_parser().format_help()
    page = REPOSITORY / "docs_new/docs/developer_guide/dspark_pd_tool.mdx"
    documented = page.read_text()
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"  {code}  {meaning}" in text
        assert re.search(rf"^\| `?{code}`? +\| {re.escape(meaning)}", documented, re.M)


def test_early_errors_have_the_same_envelope(
    capsys: pytest.CaptureFixture[str], run: Run, site: Path
) -> None:
    """Programs parse one shape, whether the verb ran, refused or was not known."""
    assert run("status", "--target", site).document.keys() == ENVELOPE
    assert run("status", "--target", site / "none").document.keys() == ENVELOPE
    assert run("nonsense").document.keys() == ENVELOPE
    assert run("apply", "--nonsense").document["schema"] == 1


@pytest.mark.parametrize("verb", ["status", "diff", "apply", "revert", "list"])
def test_json_is_one_document_on_stdout(run: Run, site: Path, verb: str) -> None:
    target = [] if verb == "list" else ["--target", site]
    outcome = run(verb, *target)
    document = outcome.document
    assert document["command"] == verb
    assert document["exit_code"] == outcome.code
    assert document["status"] == {0: "ok", 1: "differs"}[outcome.code]
    assert outcome.err == ""


def test_text_names_the_target_first(run: Run, site: Path) -> None:
    outcome = run("apply", "--target", site, text=True)
    first, *_, last = outcome.out.splitlines()
    assert first == f"target  {site}/sglang  {fake_sglang.LATEST} (dist-info)"
    assert re.fullmatch(r"applied 2 modules, 1 hunk in 1 file, \+4 lines", last)


def test_quiet_prints_nothing_but_errors(run: Run, site: Path) -> None:
    outcome = run("apply", "--target", site, "-q", text=True)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    outcome = run("apply", "--target", site / "none", "-q", text=True)
    assert outcome.out == ""
    assert "error[T101]" in outcome.err


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}


def test_the_tool_imports_neither_torch_nor_sglang(
    site: Path, overlay: Path, tmp_path: Path
) -> None:
    """It must work where an engine cannot start, and must not run what it patches."""
    engine = tmp_path / "engine"
    engine.write_text("sglang serve --model-path m --disaggregation-mode prefill")
    commands = [
        ["apply", "-q", "--target", str(site), "--overlay", str(overlay)],
        ["doctor", "-q", "--prefill", str(engine), "--decode", str(engine)],
        ["describe", "-q", "--without-sglang", "--", "--tp", "2"],
    ]
    code = (
        "import sys; from dspark_pd.cli import main; "
        f"codes = [main(command) for command in {commands!r}]; "
        "print(codes, [m for m in ('torch', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[0, 1, 0] []"


@pytest.mark.parametrize("arguments", [["--help"], ["list"]])
def test_it_starts_fast(arguments: list[str]) -> None:
    """The time the process itself works, so that a busy machine does not fail it."""
    times = []
    for _ in range(3):
        before = os.times()
        command = [sys.executable, "-m", "dspark_pd", *arguments]
        subprocess.run(
            command, env=_environment(), check=True, capture_output=True, timeout=60
        )
        after = os.times()
        user = after.children_user - before.children_user
        system = after.children_system - before.children_system
        times.append(user + system)
    assert min(times) < MAX_START_S


def test_an_interrupt_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark_pd.verbs.apply.run", interrupt)
    assert main(["apply"]) == 130
    assert "apply or revert" in capsys.readouterr().err
    monkeypatch.setattr("dspark_pd.verbs.listing.run", interrupt)
    assert main(["list"]) == 130
    # It changes nothing: there is nothing to go on with.
    assert capsys.readouterr().err == "interrupted\n"


def test_output_closed_by_its_reader_is_not_an_error() -> None:
    command = f"{sys.executable} -m dspark_pd list --errors | head -1; "
    command += "echo ${PIPESTATUS[0]}"
    done = subprocess.run(
        ["bash", "-c", command],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] in {"0", "120"}
