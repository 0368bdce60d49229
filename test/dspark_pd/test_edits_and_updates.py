"""Others change the target under the set: hand edits, updates, lost state."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import fake_sglang
from fake_sglang import snapshot
from outcome import Run

pytestmark = pytest.mark.unit

RELAY = "sglang/srt/managers/relay.py"
STATE = "sglang/.dspark_pd"


def test_an_edited_file_is_refused_and_kept(run: Run, site: Path) -> None:
    run("apply", "--target", site)
    path = site / RELAY
    path.write_text(path.read_text() + "# mine\n")
    edited = snapshot(site)
    for verb in ("apply", "revert", "diff"):
        outcome = run(verb, "--target", site)
        assert (outcome.code, outcome.codes) == (5, ["E401"]), verb
    assert run("status", "--target", site).code == 5
    assert snapshot(site) == edited


def test_an_edit_can_be_set_aside(run: Run, site: Path) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    path = site / RELAY
    path.write_text(path.read_text() + "# mine\n")
    edited = path.read_bytes()
    assert run("revert", "--target", site, "--discard-edits").code == 0
    kept = path.with_name("relay.py.edited")
    assert kept.read_bytes() == edited
    kept.unlink()
    assert snapshot(site) == before


def test_an_undone_edit_can_be_reverted(run: Run, site: Path) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    path = site / RELAY
    ours = path.read_bytes()
    path.write_bytes(ours + b"# mine\n")
    assert run("revert", "--target", site).code == 5
    path.write_bytes(ours)
    assert run("revert", "--target", site).code == 0
    assert snapshot(site) == before


def test_an_edit_from_before_apply_survives_and_is_named(run: Run, site: Path) -> None:
    path = site / RELAY
    path.write_text(path.read_text() + "# mine, from before\n")
    before = snapshot(site)
    outcome = run("apply", "--target", site)
    assert outcome.code == 0
    assert any("edited before apply" in note for note in outcome.document["notes"])
    assert "# mine, from before" in path.read_text()
    run("revert", "--target", site)
    assert snapshot(site) == before


def test_a_restored_original_is_patched_again(run: Run, site: Path) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    path = site / RELAY
    path.write_text(fake_sglang.files_of(fake_sglang.LATEST)["srt/managers/relay.py"])
    assert run("status", "--target", site).code == 1
    assert run("apply", "--target", site).data["changed"]
    assert run("status", "--target", site).code == 0
    run("revert", "--target", site)
    assert snapshot(site) == before


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_an_update_over_the_set_is_noticed(
    run: Run, site: Path, tmp_path: Path, verb: str
) -> None:
    """``pip install -U`` replaces recorded files and leaves our modules and state."""
    fake_sglang.install(site, "1.0.0")
    run("apply", "--target", site)
    fake_sglang.install(site, "1.1.0")
    status = run("status", "--target", site)
    assert status.code == 1
    assert status.data["updated"]
    happened = "SGLang went from 1.0.0 to 1.1.0 under the applied set"
    assert status.document["notes"][0].startswith(f"{happened}; dspark-pd apply --t")
    repaired = run(verb, "--target", site)
    assert (repaired.code, repaired.document["notes"][0]) == (0, happened)
    if verb == "apply":
        assert run("status", "--target", site).code == 0
        assert "nothing_stored(self" in (site / RELAY).read_text()
        assert run("revert", "--target", site).code == 0
    fresh = fake_sglang.install(tmp_path / "fresh", "1.1.0").parent
    assert snapshot(site) == snapshot(fresh)


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("gone", [False, True])
def test_the_same_release_over_the_set_is_noticed(
    run: Run, site: Path, verb: str, gone: bool
) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    applied = snapshot(site)
    fake_sglang.install(site)
    record = f"{STATE}/record.json"  # which has the files' times
    if gone:
        (site / RELAY).unlink()
    happened = "SGLang 1.2.0 was installed again or restored over the applied set: "
    happened += "1 changed file gone" if gone else "1 changed file as released"
    for asked in (["status"], ["apply", "--dry-run"]):
        (note,) = run(*asked, "--target", site).document["notes"]
        assert note.startswith(f"{happened}; dspark-pd apply --target")
    repaired = run(verb, "--target", site)
    assert (repaired.code, repaired.document["notes"][0]) == (0, happened)
    found = snapshot(site)
    assert found.keys() == (applied if verb == "apply" else before).keys()
    for tree in (found, applied):
        tree.pop(record, None)
    assert found == (applied if verb == "apply" else before)
    assert happened not in str(run("status", "--target", site).document)


def test_what_an_uninstall_leaves_is_removed(run: Run, site: Path) -> None:
    """Else ``import sglang`` finds a package without a file in it."""
    run("apply", "--target", site)
    fake_sglang.uninstall(site)
    for verb in ("status", "apply", "diff"):
        outcome = run(verb, "--target", site)
        assert (outcome.code, outcome.codes) == (3, ["T107"])
    reverted = run("revert", "--target", site)
    assert reverted.code == 0
    assert reverted.document["notes"][0] == (
        "SGLang 1.2.0 was uninstalled under the applied set"
    )
    assert list(site.iterdir()) == []
    assert run("status", "--target", site).codes == ["T101"]


def test_modules_whose_record_is_lost_are_removed(run: Run, site: Path) -> None:
    """Caches that skip hidden files lose the record; a reinstall leaves our modules."""
    before = snapshot(site)
    run("apply", "--target", site)
    shutil.rmtree(site / STATE)
    assert run("revert", "--target", site).codes == ["E402"]
    fake_sglang.install(site)
    other = site / "sglang/srt/agreement/rules.py"
    other.write_text("# of another version of the set, or somebody's\n")
    assert run("revert", "--target", site).code == 0
    assert other.exists()
    shutil.rmtree(other.parent)
    assert snapshot(site) == before


def test_the_way_out_of_an_unreadable_record_works(run: Run, site: Path) -> None:
    """A reinstall leaves the folder, and with it the record."""
    run("apply", "--target", site)
    (site / STATE / "record.json").write_text("{broken")
    fake_sglang.install(site)
    outcome = run("status", "--target", site)
    assert outcome.codes == ["E404"]
    folder = site / STATE
    assert f"and then remove {folder}" in outcome.document["errors"][0]["next"]
    shutil.rmtree(folder)
    assert run("apply", "--target", site).code == 0


def test_a_half_done_update_is_refused(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.0.0")
    run("apply", "--target", site)
    ours = (site / RELAY).read_bytes()
    fake_sglang.install(site, "1.1.0")
    (site / RELAY).write_bytes(ours)
    outcome = run("apply", "--target", site)
    assert (outcome.code, outcome.codes) == (5, ["E405"])


def test_edits_after_an_update_can_be_left(run: Run, site: Path) -> None:
    """The kept original is the older release's: it must not go over the newer file."""
    fake_sglang.install(site, "1.0.0")
    run("apply", "--target", site)
    fake_sglang.install(site, "1.1.0")
    path = site / RELAY
    path.write_text(path.read_text() + "# mine\n")
    edited = path.read_bytes()
    refused = run("revert", "--target", site)
    assert (refused.code, refused.codes) == (5, ["E405"])
    outcome = run("revert", "--target", site, "--discard-edits")
    assert outcome.code == 0
    assert f"{path.relative_to(site / 'sglang')} was left" in str(outcome.document)
    assert path.read_bytes() == edited
    assert not (site / STATE).exists()
    assert not (site / "sglang/srt/managers/relay_guard.py").exists()


def test_an_upstream_module_of_our_name_is_not_touched(run: Run, site: Path) -> None:
    """A release may bring a module where ours was: revert must leave it there."""
    fake_sglang.install(site, "1.0.0")
    run("apply", "--target", site)
    theirs = {"srt/managers/relay_guard.py": "UPSTREAM = True\n"}
    fake_sglang.install(site, "1.1.0", **theirs)
    assert run("apply", "--target", site).codes == ["H306"]
    assert run("revert", "--target", site).code == 0
    guard = site / "sglang/srt/managers/relay_guard.py"
    assert guard.read_text() == theirs["srt/managers/relay_guard.py"]


def test_a_damaged_original_is_refused(run: Run, site: Path) -> None:
    run("apply", "--target", site)
    for original in (site / STATE / "originals").iterdir():
        original.write_text("other")
    patched = (site / RELAY).read_bytes()
    outcome = run("revert", "--target", site)
    assert (outcome.code, outcome.codes) == (5, ["E403"])
    assert (site / RELAY).read_bytes() == patched


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_a_missing_file_comes_back(run: Run, site: Path, verb: str) -> None:
    before = snapshot(site)
    run("apply", "--target", site)
    applied = snapshot(site)
    (site / RELAY).unlink()
    (site / "sglang/srt/managers/relay_guard.py").unlink()
    assert run("status", "--target", site).code == 1
    assert run(verb, "--target", site).code == 0
    assert snapshot(site) == (applied if verb == "apply" else before)


def test_a_checkout_is_served_and_stays_clean(
    run: Run, site: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(site / "sglang", root / "python" / "sglang")
    (root / "python/sglang/_version.py").unlink()

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=root, check=True, capture_output=True)
        return done.stdout.decode()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "start")
    git("tag", f"v{fake_sglang.LATEST}")
    assert run("apply", "--target", root).document["target"]["source"] == "git tag"
    assert ".dspark_pd" not in git("status", "--short")
    # A file that git has put back at another commit is upstream's, not an edit.
    relay = root / "python/sglang/srt/managers/relay.py"
    git("stash", "-q")
    relay.write_text(relay.read_text() + "# newer\n")
    git("commit", "-qam", "next")
    git("tag", "v1.1.0")
    git("tag", "-d", f"v{fake_sglang.LATEST}")
    assert run("apply", "--target", root).code == 0
    assert "# newer" in relay.read_text()
    assert run("revert", "--target", root).code == 0
    assert git("status", "--short") == ""
