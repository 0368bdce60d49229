"""What the commands in messages name, and that no fault ends in a traceback."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.cli import main
from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import on_target
from dspark_pd.messages.result import Result
from outcome import Run

pytestmark = pytest.mark.unit

RELAY = "sglang/srt/managers/relay.py"
VERBS = ("status", "diff", "apply", "revert")


def edit(site: Path, text: str = "# mine\n") -> None:
    with (site / RELAY).open("a") as file:
        file.write(text)


# -- commands that can be pasted --------------------------------------------------------


def test_without_a_target_nothing_is_added() -> None:
    assert (
        on_target("run dspark-pd apply or revert", None)
        == "run dspark-pd apply or revert"
    )


@pytest.mark.parametrize("mode", ["text", "json"])
def test_an_edit_is_shown_and_undone_by_the_commands_of_its_error(
    run: Run, site: Path, mode: str
) -> None:
    run("apply", "--target", site)
    edit(site)
    if mode == "text":
        outcome = run("apply", "--target", site, text=True)
        (line,) = [x for x in outcome.err.splitlines() if x.startswith("  next")]
        text = line.removeprefix("  next").strip()
    else:
        text = run("apply", "--target", site).document["errors"][0]["next"]
    see, _, rest = text.partition(" (the edit and our lines); then undo the edit, or ")
    shown = subprocess.run(
        shlex.split(see), capture_output=True, text=True, check=False, timeout=30
    )
    assert shown.returncode == 1
    assert "+# mine" in shown.stdout
    undo = shlex.split(rest.partition(" (")[0])
    assert undo[:2] == ["dspark-pd", "revert"]
    assert run(*undo[1:]).code == 0
    assert "# mine" not in (site / RELAY).read_text()


def test_an_edit_of_a_module_of_the_set_is_shown_as_a_diff(
    run: Run, site: Path
) -> None:
    run("apply", "--target", site)
    with (site / "sglang/srt/managers/relay_guard.py").open("a") as file:
        file.write("# mine\n")
    (error,) = run("apply", "--target", site).document["errors"]
    assert re.match(
        r"diff -u \S+relay_guard.py \S+relay_guard.py \(the edit\)", error["next"]
    )


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["apply", "--dry"], "dspark-pd apply --help"),
        (["doctor", "--prefill", "a"], "dspark-pd doctor --help"),
        (
            ["doctor", "--prefill", "a", "--decode", "b", "--x"],
            "dspark-pd doctor --help",
        ),
        (["apply", "-q", "-v"], "dspark-pd apply --help"),
        (["apply", "--assume-version", "one"], "dspark-pd apply --help"),
        (["aply"], "dspark-pd --help"),
        ([], "dspark-pd --help"),
    ],
)
def test_a_wrong_command_line_is_sent_to_the_help_of_its_verb(
    arguments: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert "error[U001]" in told
    assert f"  next     {command}\n" in told


def test_an_unknown_hunk_is_answered_with_its_neighbours(run: Run) -> None:
    (error,) = run("list", "relay.keep-inptu").document["errors"]
    assert "a name such as relay.keep-input, " in error["expected"]
    assert "(3 in all)" in error["expected"]
    assert error["expected"].count(",") == 2


# -- the right one is named --------------------------------------------------------------


def test_every_verb_reports_a_lost_record_once(
    run: Run, site: Path, overlay: Path
) -> None:
    hunks = overlay / "srt/managers/relay.py.hunks.yml"
    again = fake_sglang.hunk(
        id="relay.see-store",
        function="store",
        node="for_statement",
        inside="",
        calls="sglang.srt.managers.relay_guard.is_named",
        fix="  from sglang.srt.managers.relay_guard import is_named\n\n"
        "  is_named(rows)\n  $ANCHOR",
    )
    hunks.write_text(f"{hunks.read_text()}---\n{again}")
    assert run("apply", "--target", site, "--component", "all").code == 0
    applied = fake_sglang.snapshot(site)
    shutil.rmtree(site / "sglang/.dspark_pd")
    for verb in VERBS:
        everything = [] if verb == "revert" else ["--component", "all"]
        outcome = run(verb, "--target", site, *everything)
        assert (outcome.code, outcome.codes) == (5, ["E402"]), verb
        (error,) = outcome.document["errors"]
        files = "2 files: srt/devices.py, srt/managers/relay.py"
        assert error["title"] == f"lines of the set without a record in {files}"
        ids = ("devices.accept-named", "relay.keep-input", "relay.see-store")
        assert error["found"] == f"lines of {', '.join(ids)}"
        assert "edited before" not in str(outcome.document["notes"])
    del applied["sglang/.dspark_pd"]
    left = {k: v for k, v in applied.items() if ".dspark_pd" not in k}
    assert fake_sglang.snapshot(site) == left


def test_revert_of_a_target_without_our_lines_needs_no_record(
    run: Run, site: Path
) -> None:
    edit(site, "from sglang.srt.managers import relay_guard_of_theirs\n")
    outcome = run("revert", "--target", site)
    assert (outcome.code, outcome.data["changed"]) == (0, False)


def test_a_file_that_is_not_utf8_is_reported_as_such(
    run: Run, site: Path, overlay: Path
) -> None:
    """Also where a drop condition looks into the file before any rule does."""
    hunks = overlay / "srt/managers/relay.py.hunks.yml"
    review = fake_sglang.REVIEW
    match = '{match: "places = batch.spots()"}'
    hunks.write_text(hunks.read_text().replace(review, match))
    path = site / RELAY
    path.write_bytes(path.read_bytes() + b"# \xe9\n")
    for verb in ("status", "apply"):
        assert run(verb, "--target", site).codes == ["H308"]


def test_a_set_that_is_too_old_says_how_to_renew_it(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.3.0")
    (error,) = run("apply", "--target", site).document["errors"]
    assert error["next"].startswith("git pull && pip install . (in the clone")
    assert error["next"].endswith("--assume-version 1.2.0")
    assert "the one hunk fits" in error["found"]
    (site / RELAY).write_text("empty = True\n")
    (error,) = run("apply", "--target", site).document["errors"]
    assert "0 of 1 hunks fit; not: relay.keep-input" in error["found"]


# -- faults of the tool itself ----------------------------------------------------------


@pytest.mark.parametrize(
    "verb", [*VERBS, "list", "explain", "export", "describe", "doctor", "demo"]
)
def test_no_verb_ends_in_a_traceback(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("made up")

    places = {
        "list": "dspark_pd.verbs.listing.run",
        "demo": "dspark_pd.bed.demo.main",
    }
    monkeypatch.setattr(places.get(verb, f"dspark_pd.verbs.{verb}.run"), fail)
    needed = {
        "export": ["x"],
        "explain": ["x"],
        "doctor": ["--prefill", "a", "--decode", "b"],
    }
    arguments = [verb, *needed.get(verb, [])]
    assert main(arguments) == exit_codes.INTERNAL
    quiet = capsys.readouterr().err
    assert "error[X901]" in quiet and "ZeroDivisionError: made up" in quiet
    assert "Traceback" not in quiet
    assert main([*arguments, "-v"]) == exit_codes.INTERNAL
    loud = capsys.readouterr().err
    assert "Traceback" in loud and "error[X901]" in loud


def test_a_fault_in_the_output_is_one_document(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(options: object) -> Result:
        return Result(data={"x": object()})

    monkeypatch.setattr("dspark_pd.verbs.listing.run", odd)
    outcome = run("list")
    assert (outcome.code, outcome.codes) == (exit_codes.INTERNAL, ["X901"])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_path_can_be_shown(tmp_path: Path, encoding: str) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "python")
    target = os.fsencode(tmp_path) + b"/caf\xc3\xa9 \xff"
    command = [sys.executable, "-m", "dspark_pd", "status", "--target", target]
    done = subprocess.run(
        command, env=environ, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == exit_codes.TARGET
    assert b"error[T101]" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("form", [[], ["--json"], ["-q"]])
@pytest.mark.parametrize(
    ("redirection", "code"),
    [(">&-", exit_codes.OK), (">/dev/full", exit_codes.FILE_SYSTEM)],
)
def test_an_answer_that_cannot_be_written(
    form: list[str], redirection: str, code: int
) -> None:
    """No traceback; the exit code is of what was done or names the output."""
    python = str(Path(__file__).resolve().parents[2] / "python")
    words = ["describe", *form, "--without-sglang", "--", "--tp-size", "2"]
    line = f'exec "$@" {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "dspark_pd", *words],
        env={**os.environ, "PYTHONPATH": python},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    if code:
        assert "error[F506]" in done.stderr and "Errno 28" in done.stderr
        assert "X901" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["apply", "--help"], ["demo", "--help"]]
)
def test_help_that_cannot_be_written_fails_as_well(
    words: list[str], unbuffered: str
) -> None:
    python = str(Path(__file__).resolve().parents[2] / "python")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dspark_pd", *words],
            env={**os.environ, "PYTHONPATH": python, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == exit_codes.FILE_SYSTEM, done.stderr
    assert done.stderr.startswith("error[F506]") and "Exception" not in done.stderr
