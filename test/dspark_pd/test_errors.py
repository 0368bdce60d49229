"""Every error code: one scenario that meets it, its exit code, and its preview."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import PARTS, Problem, catalogue
from dspark_pd.planning import astgrep
from dspark_pd.target import fsops
from outcome import Outcome, Run

pytestmark = pytest.mark.unit

RELAY = "sglang/srt/managers/relay.py"
RELAY_HUNKS = "srt/managers/relay.py.hunks.yml"


@dataclass(frozen=True)
class Bench:
    """What a scenario works with."""

    run: Run
    site: Path
    overlay: Path
    patch: pytest.MonkeyPatch

    def apply(self, *arguments: object) -> Outcome:
        return self.run("apply", "--target", self.site, *arguments)

    def change(self, file: str, old: str, new: str) -> None:
        """Change the patch set."""
        path = self.overlay / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def edit(self, path: str, text: str) -> None:
        """Append to a file of the target."""
        with (self.site / path).open("a") as file:
            file.write(text)


Scenario = Callable[[Bench], Outcome]
SCENARIOS: dict[str, Scenario] = {}


def scenario(code: str) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        SCENARIOS[code] = function
        return function

    return register


@scenario("U001")
def _mistyped_option(bench: Bench) -> Outcome:
    return bench.apply("--dry")


@scenario("U002")
def _unknown_hunk(bench: Bench) -> Outcome:
    return bench.run("list", "relay.drop-input")


@scenario("U004")
def _no_address(bench: Bench) -> Outcome:
    return bench.run("doctor", "--prefill", "host:30000", "--decode", "host:30001")


@scenario("U006")
def _no_engine(bench: Bench) -> Outcome:
    return bench.run("describe", "--without-sglang", "--", "docker", "run", "engine")


@scenario("U007")
def _assumes_another_release(bench: Bench) -> Outcome:
    outcome = bench.apply("--assume-version", "1.1.0")
    assert outcome.document["target"]["release"] == fake_sglang.LATEST, "as it is"
    return outcome


@scenario("U008")
def _no_config(bench: Bench) -> Outcome:
    words = ("--tp", "2", "--config", "no.yaml")
    return bench.run("describe", "--without-sglang", "--", *words)


@scenario("T106")
def _no_answer(bench: Bench) -> Outcome:
    nowhere = "http://127.0.0.1:9"
    return bench.run("doctor", "--prefill", nowhere, "--decode", nowhere)


@scenario("T101")
def _empty_target(bench: Bench) -> Outcome:
    return bench.run("status", "--target", bench.overlay.parent)


@scenario("T107")
def _uninstalled(bench: Bench) -> Outcome:
    bench.apply()
    fake_sglang.uninstall(bench.site)
    return bench.apply()


@scenario("T102")
def _no_release(bench: Bench) -> Outcome:
    shutil.rmtree(bench.site / f"sglang-{fake_sglang.LATEST}.dist-info")
    (bench.site / "sglang/_version.py").unlink()
    return bench.apply()


@scenario("T105")
def a_component_for_later_releases(bench: Bench) -> Outcome:
    bench.change("srt/devices.py.hunks.yml", ">=1.0.0,<1.3.0", ">=1.2.0,<1.3.0")
    fake_sglang.install(bench.site, "1.1.0")
    return bench.apply("--component", "cpu")


@scenario("T103")
def _newer_release(bench: Bench) -> Outcome:
    fake_sglang.install(bench.site, "1.3.0")
    return bench.apply()


@scenario("S201")
def _broken_yaml(bench: Bench) -> Outcome:
    bench.change(RELAY_HUNKS, "severity: hint", "severity: [hint")
    return bench.apply()


@scenario("S202")
def _wrong_kind(bench: Bench) -> Outcome:
    bench.change(RELAY_HUNKS, "kind: fix", "kind: patch")
    return bench.apply()


@scenario("S203")
def _repeated_id(bench: Bench) -> Outcome:
    bench.change("srt/start.py.hunks.yml", "start.check-settings", "relay.keep-input")
    return bench.apply()


@scenario("S204")
def _impossible_rule(bench: Bench) -> Outcome:
    bench.change("srt/devices.py.hunks.yml", "kind: if_statement", "kind: iff")
    outcome = bench.apply("--component", "cpu")
    assert "backtrace" not in outcome.out.lower(), "of ast-grep"
    return outcome


@scenario("H301")
def _two_matches(bench: Bench) -> Outcome:
    again = (
        "\n\nclass Relay:\n    def look_up(self, batch):\n        places = batch.p()\n"
    )
    bench.edit(RELAY, again)
    return bench.apply()


@scenario("H302")
def _changes_upstream(bench: Bench) -> Outcome:
    bench.change(RELAY_HUNKS, "  $ANCHOR\n  from", "  places = []\n  from")
    return bench.apply()


@scenario("H304")
def _does_not_compile(bench: Bench) -> Outcome:
    bench.change(RELAY_HUNKS, "return []", "return [")
    return bench.apply()


@scenario("H305")
def _missing_file(bench: Bench) -> Outcome:
    (bench.site / RELAY).unlink()
    return bench.apply()


@scenario("H306")
def _taken_module(bench: Bench) -> Outcome:
    (bench.site / "sglang/srt/managers/relay_guard.py").write_text("theirs = 1\n")
    return bench.apply()


@scenario("H307")
def _unserved_release(bench: Bench) -> Outcome:
    bench.change(RELAY_HUNKS, ">=1.1.0,<1.3.0", ">=1.1.0,<1.2.0")
    return bench.apply()


@scenario("H308")
def _other_encoding(bench: Bench) -> Outcome:
    path = bench.site / RELAY
    path.write_bytes(path.read_bytes() + b"# \xe9\n")
    return bench.apply()


@scenario("H309")
def _broken_before(bench: Bench) -> Outcome:
    bench.edit(RELAY, "def :\n")
    outcome = bench.apply()
    assert "relay.keep-input" not in outcome.out, "no hunk broke it"
    return outcome


@scenario("E401")
def _edited(bench: Bench) -> Outcome:
    bench.apply()
    bench.edit(RELAY, "# mine\n")
    return bench.apply()


@scenario("E402")
def _lost_record(bench: Bench) -> Outcome:
    bench.apply()
    shutil.rmtree(bench.site / "sglang/.dspark_pd")
    return bench.apply()


@scenario("E403")
def _damaged_original(bench: Bench) -> Outcome:
    bench.apply()
    shutil.rmtree(bench.site / "sglang/.dspark_pd/originals")
    return bench.run("revert", "--target", bench.site)


@scenario("E404")
def _newer_record(bench: Bench) -> Outcome:
    bench.apply()
    record = bench.site / "sglang/.dspark_pd/record.json"
    record.write_text(record.read_text().replace('"schema": 1', '"schema": 2'))
    return bench.run("revert", "--target", bench.site)


@scenario("E405")
def _edited_after_update(bench: Bench) -> Outcome:
    fake_sglang.install(bench.site, "1.0.0")
    bench.apply()
    fake_sglang.install(bench.site, "1.1.0")
    bench.edit(RELAY, "# mine\n")
    return bench.apply()


def _failing_write(bench: Bench, code: int) -> Outcome:
    def fail(handle: int, data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    bench.patch.setattr(fsops, "_write_all", fail)
    return bench.apply()


@scenario("F501")
def _read_only(bench: Bench) -> Outcome:
    return _failing_write(bench, errno.EROFS)


@scenario("F502")
def _full(bench: Bench) -> Outcome:
    return _failing_write(bench, errno.ENOSPC)


@scenario("F503")
def _broken_disk(bench: Bench) -> Outcome:
    return _failing_write(bench, errno.EIO)


@scenario("F504")
def _second_writer(bench: Bench) -> Outcome:
    handle = os.open(bench.site / "sglang", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return bench.apply()
    finally:
        os.close(handle)


@scenario("F505")
def _no_ast_grep(bench: Bench) -> Outcome:
    astgrep.program.cache_clear()
    bench.patch.setattr(astgrep.sys, "executable", str(bench.site / "python"))
    bench.patch.setenv("PATH", str(bench.site))
    try:
        return bench.apply()
    finally:
        astgrep.program.cache_clear()


@scenario("X901")
def _fault(bench: Bench) -> Outcome:
    def fail(options: object) -> None:
        raise ZeroDivisionError("made up")

    bench.patch.setattr("dspark_pd.verbs.apply.run", fail)
    return bench.apply()


# Without those of the command line, of engines, and of what hides the target itself.
_ON_A_TARGET = SCENARIOS.keys() - {
    *("U001", "U002", "U004", "U006", "U008", "T101", "T106", "E404", "X901")
}


@pytest.mark.parametrize("code", SCENARIOS)
def test_the_error_is_met_and_complete(
    code: str, run: Run, site: Path, overlay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        outcome = SCENARIOS[code](Bench(run, site, overlay, patch))
    assert outcome.codes[0] == code
    assert outcome.code == catalogue()[code].exit_code
    assert outcome.document["exit_code"] == outcome.code
    if code in _ON_A_TARGET:
        assert outcome.document["target"]["path"] == str(site / "sglang")
    for error in outcome.document["errors"]:
        for part in PARTS:
            text = error[part]
            assert text and "{" not in text and "None" not in text, (part, text)


def test_every_code_has_a_scenario() -> None:
    # test_export, test_messages, test_measure
    elsewhere = {"U003", "U005", "T104", "F506", "F507", "T108", "T109"}
    assert set(SCENARIOS) | elsewhere == set(catalogue())


_FAMILIES = {
    "U": exit_codes.USAGE,
    "T": exit_codes.TARGET,
    "S": exit_codes.MISMATCH,
    "H": exit_codes.MISMATCH,
    "E": exit_codes.EDITED,
    "F": exit_codes.FILE_SYSTEM,
    "X": exit_codes.INTERNAL,
}


@pytest.mark.parametrize("code", catalogue())
def test_the_texts_of_an_error_are_complete(code: str) -> None:
    kind = catalogue()[code]
    assert kind.exit_code == _FAMILIES[code[0]]
    templates = [getattr(kind, part) for part in PARTS]
    parsed = [string.Formatter().parse(template) for template in templates]
    used = {name for fields in parsed for _, name, _, _ in fields if name}
    assert used == set(kind.example), "made-up values for all fields, and no others"
    problem = Problem(code, kind.example)
    text = problem.as_text()
    assert text.startswith(f"error[{code}] ")
    assert all(f"\n  {part:<9}" in text for part in PARTS[1:])
    # A command on a target names it: else it would work on the interpreter's SGLang.
    following = problem.on("/opt/my serve").part("next")
    for command in re.findall(r"dspark-pd (?:status|diff|apply|revert)\b.*", following):
        assert re.match(r"dspark-pd \w+ --target (PATH|'/opt/my serve')", command)
    assert "--target" not in problem.part("found")


def test_list_errors_shows_all(run: Run) -> None:
    outcome = run("list", "--errors", text=True)
    assert outcome.code == 0
    for code in catalogue():
        assert f"error[{code}]" in outcome.out


def test_many_problems_are_reported_together(run: Run, site: Path) -> None:
    """A user who meets a new build should not find what does not fit one by one."""
    fake_sglang.install(site, "1.1.0")
    for path in ("srt/managers/relay.py", "srt/start.py"):
        (site / "sglang" / path).write_text("empty = True\n")
    outcome = run("apply", "--target", site)
    assert outcome.codes == ["H301", "H301"]
