"""Apply and revert on a healthy target."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

import fake_sglang
from fake_sglang import snapshot
from outcome import Run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("release", fake_sglang.RELEASES)
def test_revert_of_apply_is_the_same_tree(run: Run, site: Path, release: str) -> None:
    fake_sglang.install(site, release)
    before = snapshot(site)
    assert run("apply", "--target", site, "--component", "all").code == 0
    assert snapshot(site) != before
    assert run("revert", "--target", site).code == 0
    assert snapshot(site) == before


def test_apply_inserts_our_lines(run: Run, site: Path) -> None:
    run("apply", "--target", site)
    relay = (site / "sglang/srt/managers/relay.py").read_text()
    place = "places = batch.places()  # where they were stored\n"
    ours = "        from sglang.srt.managers.relay_guard import nothing_stored\n"
    assert f"        {place}{ours}" in relay
    assert relay.count("nothing_stored(self, batch)") == 1
    py_compile.compile(str(site / "sglang/srt/managers/relay.py"), doraise=True)


def test_apply_twice_is_apply_once(run: Run, site: Path) -> None:
    assert run("apply", "--target", site).data["changed"]
    once = snapshot(site)
    again = run("apply", "--target", site)
    assert (again.code, again.data["changed"]) == (0, False)
    assert snapshot(site) == once


def test_a_second_apply_says_so_in_one_line(run: Run, site: Path) -> None:
    first = run("apply", "--target", site, text=True)
    second = run("apply", "--target", site, text=True)
    loud = run("apply", "--target", site, "-v", text=True)
    assert len(first.out.splitlines()) == 5
    assert second.out.splitlines()[1:] == [
        "already applied: 2 modules, 1 hunk in 1 file, +4 lines"
    ]
    assert set(first.out.splitlines()[1:-1]) <= set(loud.out.splitlines())


def test_engines_are_to_be_restarted_after_a_change(run: Run, site: Path) -> None:
    restart = "note: restart the engines that run from here"
    for verb in ("apply", "revert"):
        changed = run(verb, "--target", site, text=True)
        assert changed.err.splitlines()[-1] == restart
        assert restart not in run(verb, "--target", site, text=True).err
    assert restart not in run("apply", "--target", site, "--dry-run", text=True).err


@pytest.mark.parametrize("mode", py_compile.PycInvalidationMode)
def test_python_runs_the_new_text(
    run: Run, site: Path, mode: py_compile.PycInvalidationMode
) -> None:
    """Images are compiled so that Python never looks at the source again."""
    relay = site / "sglang/srt/managers/relay.py"
    ask = "from sglang.srt.managers.relay import Relay as R; print(R.look_up.__code__"

    def compile_all() -> None:
        for path in relay.parent.glob("*.py"):
            py_compile.compile(str(path), doraise=True, invalidation_mode=mode)

    def is_ours() -> bool:
        code = f"{ask}.co_names)"
        given = {"cwd": site, "capture_output": True, "text": True, "check": True}
        done = subprocess.run([sys.executable, "-c", code], timeout=60, **given)
        return "nothing_stored" in done.stdout

    for verb, ours in (("apply", True), ("revert", False)):
        compile_all()
        assert is_ours() is not ours
        assert run(verb, "--target", site).code == 0
        assert is_ours() is ours
    kept = list(relay.parent.glob("__pycache__/__init__.*.pyc"))
    assert kept, "what did not change keeps its compiled form"


def test_a_string_over_several_lines_is_not_reindented(run: Run, site: Path) -> None:
    """ast-grep indents the text of a string again when it repeats a statement."""
    fake_sglang.install(site, "1.1.0")
    run("apply", "--target", site)
    start = (site / "sglang/srt/start.py").read_text()
    assert '"""starting\n  with a text over lines"""' in start
    assert "    check_settings(settings)\n    return settings\n" in start


def test_dry_run_writes_nothing_and_says_that_it_would(run: Run, site: Path) -> None:
    before = snapshot(site)
    outcome = run("apply", "--target", site, "--dry-run")
    assert (outcome.code, outcome.data["pending"]) == (1, True)
    assert snapshot(site) == before
    run("apply", "--target", site)
    assert run("apply", "--target", site, "--dry-run").code == 0


def test_cpu_is_applied_only_when_named(run: Run, site: Path) -> None:
    run("apply", "--target", site)
    devices = site / "sglang/srt/devices.py"
    assert "is_named" not in devices.read_text()
    added = run("apply", "--target", site, "--component", "cpu")
    assert "is_named" in devices.read_text()
    assert added.data["components"][-1] == "cpu"
    relay = (site / "sglang/srt/managers/relay.py").read_text()
    assert "nothing_stored" in relay, "adding a component took another one off"


def test_one_component_can_be_reverted(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.1.0")
    original = (site / "sglang/srt/start.py").read_bytes()
    run("apply", "--target", site)
    outcome = run("revert", "--target", site, "--component", "agreement")
    assert outcome.code == 0
    assert (site / "sglang/srt/start.py").read_bytes() == original
    assert not (site / "sglang/srt/agreement").exists()
    assert "nothing_stored" in (site / "sglang/srt/managers/relay.py").read_text()


@pytest.mark.parametrize("verb", ["apply", "diff", "status"])
def test_a_component_brings_what_it_needs(run: Run, site: Path, verb: str) -> None:
    fake_sglang.install(site, "1.1.0")
    outcome = run(verb, "--target", site, "--component", "agreement")
    assert outcome.data["components"] == ["native", "agreement"]
    assert "agreement needs native, which come along" in outcome.document["notes"]
    relay = (site / "sglang/srt/managers/relay.py").read_text()
    assert ("nothing_stored" in relay) is (verb == "apply")


def test_a_component_goes_with_the_one_it_needs(run: Run, site: Path) -> None:
    before = snapshot(site)
    run("apply", "--target", site, "--component", "agreement", "--component", "cpu")
    outcome = run("revert", "--target", site, "--component", "native")
    assert outcome.data["components"] == []
    assert outcome.document["notes"][:-1] == [
        f"{name} is reverted too, because it needs native"
        for name in ("agreement", "cpu")
    ]
    assert snapshot(site) == before


def test_an_unknown_component_is_refused(run: Run, site: Path) -> None:
    for verb in ("apply", "revert", "diff", "status"):
        outcome = run(verb, "--target", site, "--component", "handof")
        assert outcome.codes == ["U002"], verb
        assert "handoff" in outcome.document["errors"][0]["expected"]


@pytest.mark.parametrize("verb", ["revert", "apply"])
def test_a_record_with_a_components_former_name_is_understood(
    run: Run, site: Path, verb: str
) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    applied = snapshot(site)
    record = site / "sglang/.dspark_pd/record.json"
    text = record.read_text()
    record.write_text(text.replace('"agreement"', '"handshake"'))
    assert record.read_text() != text
    outcome = run(verb, "--target", site, "--component", "handshake")
    assert outcome.code == 0
    if verb == "apply":
        assert snapshot(site) == applied
    else:
        assert not (site / "sglang/srt/agreement").exists()
    run("revert", "--target", site)
    assert snapshot(site) == before


def test_revert_of_nothing_is_fine(run: Run, site: Path) -> None:
    before = snapshot(site)
    outcome = run("revert", "--target", site)
    assert (outcome.code, outcome.data["changed"]) == (0, False)
    assert snapshot(site) == before


def test_times_and_modes_come_back(run: Run, site: Path) -> None:
    """Compiled files name the time of their source: the old ones are right again."""
    path = site / "sglang/srt/managers/relay.py"
    os.chmod(path, 0o640)
    os.utime(path, ns=(10**18, 10**18))
    run("apply", "--target", site)
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_mtime_ns != 10**18
    run("apply", "--target", site, "--component", "cpu")
    run("revert", "--target", site)
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_mtime_ns == 10**18


def test_carriage_returns_stay(run: Run, site: Path) -> None:
    path = site / "sglang/srt/managers/relay.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(site)
    run("apply", "--target", site)
    data = path.read_bytes()
    assert b"nothing_stored" in data
    assert data.count(b"\n") == data.count(b"\r\n")
    run("revert", "--target", site)
    assert snapshot(site) == before


def test_a_linked_file_is_replaced_and_its_link_comes_back(
    run: Run, site: Path, tmp_path: Path
) -> None:
    """uv and conda link installed files to a cache that other environments share."""
    path = site / "sglang/srt/managers/relay.py"
    cached = tmp_path / "cache" / "relay.py"
    cached.parent.mkdir()
    path.rename(cached)
    path.symlink_to(cached)
    before, shared = snapshot(site), cached.read_bytes()
    run("apply", "--target", site)
    assert b"nothing_stored" in path.read_bytes()
    assert cached.read_bytes() == shared
    run("revert", "--target", site)
    assert snapshot(site) == before
    assert path.is_symlink()


def test_a_linked_target_folder_works(run: Run, site: Path, tmp_path: Path) -> None:
    before = snapshot(site)
    link = tmp_path / "linked"
    link.symlink_to(site / "sglang")
    assert run("apply", "--target", link).code == 0
    assert run("status", "--target", site).code == 0
    assert run("revert", "--target", link).code == 0
    assert snapshot(site) == before


def test_compiled_files_of_our_modules_go_too(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.1.0")
    run("apply", "--target", site)
    module = site / "sglang/srt/agreement/rules.py"
    py_compile.compile(str(module), doraise=True)
    run("revert", "--target", site)
    assert not module.parent.exists()


def test_a_foreign_file_in_our_folder_stays(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.1.0")
    run("apply", "--target", site)
    notes = site / "sglang/srt/agreement/notes.txt"
    notes.write_text("mine")
    assert run("revert", "--target", site).code == 0
    assert notes.read_text() == "mine"


def test_a_changed_set_is_applied_over_the_old_one(
    run: Run, site: Path, overlay: Path
) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    hunks = overlay / "srt/managers/relay.py.hunks.yml"
    hunks.write_text(hunks.read_text().replace("return []", "return list()"))
    assert run("diff", "--target", site).code == 1
    assert run("apply", "--target", site).data["changed"]
    relay = (site / "sglang/srt/managers/relay.py").read_text()
    assert relay.count("nothing_stored(self, batch)") == 1
    assert "return list()" in relay
    run("revert", "--target", site)
    assert snapshot(site) == before


def test_apply_says_which_components_have_nothing_for_the_release(
    run: Run, site: Path, overlay: Path
) -> None:
    hunks = overlay / "srt/devices.py.hunks.yml"
    hunks.write_text(hunks.read_text().replace(">=1.0.0,<1.3.0", ">=1.2.0,<1.3.0"))
    fake_sglang.install(site, "1.1.0")
    before = snapshot(site)
    for verb in ("apply", "diff", "status"):
        outcome = run(verb, "--target", site, "--component", "cpu")
        assert (outcome.code, outcome.codes) == (3, ["T105"])
        (error,) = outcome.document["errors"]
        assert error["title"] == "nothing for 1.1.0 in: cpu"
        assert error["found"] == "cpu serves from 1.2.0"
        assert snapshot(site) == before
    both = ("--component", "native", "--component", "cpu")
    assert run("apply", "--target", site, *both).codes == ["T105"]
    assert snapshot(site) == before, "all or nothing"


def test_components_for_later_releases_do_not_stop_all_of_them(
    run: Run, site: Path, overlay: Path
) -> None:
    hunks = overlay / "srt/devices.py.hunks.yml"
    hunks.write_text(hunks.read_text().replace(">=1.0.0,<1.3.0", ">=1.2.0,<1.3.0"))
    fake_sglang.install(site, "1.1.0")
    outcome = run("apply", "--target", site, "--component", "all")
    assert outcome.code == 0 and outcome.data["changed"]
    assert "component cpu has nothing for SGLang 1.1.0" in outcome.document["notes"][0]
    assert run("status", "--target", site, "--component", "all").code == 0
