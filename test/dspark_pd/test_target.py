"""A target is found wherever SGLang may be, without importing it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.target.target import find_target
from outcome import Run

pytestmark = pytest.mark.unit


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with the latest fake SGLang."""
    root = tmp_path / "venv"
    fake_sglang.install(root / "lib/python3.11/site-packages")
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(sys.executable)
    return root


def _editable(tmp_path: Path, venv: Path, url: str | None = None) -> Path:
    """Replace the SGLang of ``venv`` by an editable install; return its checkout."""
    checkout = tmp_path / "a checkout"
    fake_sglang.install(checkout / "python")
    folder = venv / "lib/python3.11/site-packages"
    (folder / "sglang").rename(tmp_path / "away")
    info = folder / f"sglang-{fake_sglang.LATEST}.dist-info"
    direct = {
        "url": url or (checkout / "python").as_uri(),
        "dir_info": {"editable": True},
    }
    (info / "direct_url.json").write_text(json.dumps(direct))
    return checkout


@pytest.mark.parametrize(
    "part",
    [
        ".",
        "bin/python",
        "lib/python3.11/site-packages",
        "lib/python3.11/site-packages/sglang",
    ],
)
def test_an_installed_one(venv: Path, part: str) -> None:
    target = find_target(str(venv / part))
    assert target.root == venv / "lib/python3.11/site-packages/sglang"
    assert (str(target.release), target.source) == (fake_sglang.LATEST, "dist-info")


def test_a_checkout(tmp_path: Path) -> None:
    fake_sglang.install(tmp_path / "python")
    (tmp_path / "python" / f"sglang-{fake_sglang.LATEST}.dist-info").rename(
        tmp_path / "elsewhere"
    )
    target = find_target(str(tmp_path))
    assert target.root == tmp_path / "python/sglang"
    assert (str(target.release), target.source) == (fake_sglang.LATEST, "_version.py")


@pytest.mark.parametrize("named", [".", "bin/python", "lib/python3.11/site-packages"])
def test_an_editable_install_is_followed(
    tmp_path: Path, venv: Path, named: str
) -> None:
    checkout = _editable(tmp_path, venv)
    assert find_target(str(venv / named)).root == checkout / "python/sglang"


def test_an_editable_install_knows_the_release_of_its_checkout(
    tmp_path: Path, venv: Path
) -> None:
    """The generated module is not in git, and a shallow clone has no tag."""
    checkout = _editable(tmp_path, venv)
    for left in checkout.glob("python/sglang-*.dist-info"):
        shutil.rmtree(left)
    (checkout / "python/sglang/_version.py").unlink()
    target = find_target(str(venv))
    assert (str(target.release), target.source) == (
        fake_sglang.LATEST,
        "editable install",
    )
    assert find_target(str(checkout)).release is None


def test_an_install_from_an_archive_is_not_followed(
    run: Run, tmp_path: Path, venv: Path
) -> None:
    _editable(tmp_path, venv, url="https://example.org/sglang.zip")
    assert run("status", "--target", venv).codes == ["T101"]


def test_a_packed_wheel_is_refused_as_a_target(run: Run, tmp_path: Path) -> None:
    """Its grandparent folder may hold an SGLang that nobody meant."""
    fake_sglang.install(tmp_path)
    wheel = tmp_path / "wheels" / "sglang-1.2.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_text("")
    outcome = run("apply", "--target", wheel)
    assert outcome.codes == ["T101"]
    assert outcome.document["errors"][0]["found"] == "a file"


def test_a_path_that_does_not_exist_is_named_as_such(run: Run, tmp_path: Path) -> None:
    outcome = run("status", "--target", tmp_path / "no")
    assert outcome.codes == ["T101"]
    assert outcome.document["errors"][0]["found"] == "no such path"


@pytest.mark.parametrize(
    "words",
    [
        *(["status", "--target", ""], ["revert", "--target="]),
        ["doctor", "--prefill", "", "--decode", "http://127.0.0.1:9"],
        *(["export", ""], ["export", ".", "--out", ""], ["list", ""]),
    ],
)
def test_an_empty_path_is_refused(run: Run, words: list[str]) -> None:
    """An unset variable must not mean the SGLang of this interpreter."""
    outcome = run(*words)
    assert (outcome.code, outcome.codes) == (2, ["U001"])
    assert "empty" in outcome.document["errors"][0]["found"]


def test_the_one_of_this_interpreter(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    # Another test of this run may have imported the real one.
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    assert find_target(None).root == site / "sglang"
    assert "sglang" not in sys.modules


def test_the_overlay_is_refused_as_a_target(run: Run, overlay: Path) -> None:
    """It mirrors SGLang's tree, and patching it would destroy the set."""
    for place in (overlay, overlay.parent, overlay.parent.parent):
        assert run("apply", "--target", place).codes == ["T101"]


def test_the_search_is_named(run: Run, tmp_path: Path) -> None:
    outcome = run("status", "--target", tmp_path)
    (error,) = outcome.document["errors"]
    assert str(tmp_path) in error["expected"]


@pytest.mark.parametrize("text", ["0.5.23", "0.5.23.post1", "0.5.23+cu129"])
def test_the_release_is_read_as_written(site: Path, text: str) -> None:
    info = site / f"sglang-{fake_sglang.LATEST}.dist-info"
    info.rename(site / f"sglang-{text}.dist-info")
    assert str(find_target(str(site)).release) == text


def test_a_local_build_of_a_known_release_is_known(run: Run, site: Path) -> None:
    info = site / f"sglang-{fake_sglang.LATEST}.dist-info"
    info.rename(site / f"sglang-{fake_sglang.LATEST}+cu129.dist-info")
    assert run("apply", "--target", site).code == 0


def test_a_post_release_is_not_taken_for_known(run: Run, site: Path) -> None:
    info = site / f"sglang-{fake_sglang.LATEST}.dist-info"
    info.rename(site / f"sglang-{fake_sglang.LATEST}.post1.dist-info")
    assert run("apply", "--target", site).codes == ["T103"]


@pytest.mark.parametrize("recorded", ["nothing", "1.3.0"])
def test_an_assumed_release_is_remembered(run: Run, site: Path, recorded: str) -> None:
    """What the user vouched for at apply holds for the verbs that follow."""
    if recorded == "nothing":
        shutil.rmtree(site / f"sglang-{fake_sglang.LATEST}.dist-info")
        (site / "sglang/_version.py").unlink()
    else:
        info = site / f"sglang-{fake_sglang.LATEST}.dist-info"
        info.rename(info.with_name(f"sglang-{recorded}.dist-info"))
    before = fake_sglang.snapshot(site)
    target = ["--target", site]
    assert run("status", *target).code == 3
    assert run("apply", *target, "--assume-version", fake_sglang.LATEST).code == 0
    for verb in ("status", "diff", "apply"):
        outcome = run(verb, *target)
        assert outcome.code == 0, outcome.out
        assert outcome.document["target"]["source"] == "assumed at apply"
        assert outcome.document["target"]["release"] == fake_sglang.LATEST
    assert run("revert", *target).code == 0
    assert fake_sglang.snapshot(site) == before


def test_an_assumed_release_ends_with_an_update(run: Run, site: Path) -> None:
    info = site / f"sglang-{fake_sglang.LATEST}.dist-info"
    unknown = info.rename(info.with_name("sglang-1.3.0.dist-info"))
    run("apply", "--target", site, "--assume-version", fake_sglang.LATEST)
    unknown.rename(unknown.with_name("sglang-1.4.0.dist-info"))
    outcome = run("status", "--target", site)
    assert (outcome.code, outcome.codes[0]) == (3, "T103")
    assert outcome.data["updated"] is True
    assert "went from" not in str(outcome.document["notes"]), "that was assumed"
