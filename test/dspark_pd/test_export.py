"""``export``: commits on a checkout, in upstream's layout, without touching its files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.export import formatter
from dspark_pd.export.pages import OURS, PAGE, for_sglang, page_of
from dspark_pd.patchset.patch_set import load_patch_set
from outcome import Run
from test_docs import slug

pytestmark = pytest.mark.unit

TEST_FILE = "test/registered/unit/agreement/test_rules.py"
HELPER = "test/registered/unit/agreement/rule_fixtures.py"
HELPER_THERE = "python/sglang/test/rule_fixtures.py"
ENTRY = '{"pages": [\n    "docs/advanced_features/pd_disaggregation"\n]}\n'
OTHER = "test/registered/unit/managers/test_other.py"
OPEN, CLOSE = "{/* repository only */}", "{/* end of repository only */}"


def git(root: Path, *arguments: str, stdin: bytes | None = None) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=root,
        check=True,
        capture_output=True,
        input=stdin,
    )
    return done.stdout.decode()


def make_checkout(
    root: Path,
    release: str = "1.1.0",
    hooks: str = "",
    docs: str = "docs",
    navigation: str = ENTRY,
) -> Path:
    for path, text in fake_sglang.files_of(release).items():
        place = root / "python" / "sglang" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (root / "python/sglang/_version.py").unlink()
    if hooks:
        (root / ".pre-commit-config.yaml").write_text(hooks)
    if docs:
        (root / docs).mkdir()
        (root / docs / "docs.json").write_text(navigation)
    git(root, "init", "-q", "-b", "master")
    git(root, "add", ".")
    git(root, "commit", "-qm", "start")
    git(root, "tag", f"v{release}")
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


@pytest.fixture(autouse=True)
def repository(overlay: Path) -> Path:
    """Give the patch set the tests and texts that an export takes along."""
    root = overlay.parent.parent
    texts = {
        TEST_FILE: "from rule_fixtures import X\n"
        "from sglang.srt.agreement import rules\n\n\ndef test_it( ):\n    assert X\n",
        HELPER: "X = 1\n",
        OTHER: "def test_nothing():\n    pass\n",
        f"{OURS}/{PAGE}": "# A page\n",
    }
    for path, text in texts.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def export(run: Run, checkout: Path, *more: object) -> dict[str, set[str]]:
    """Return the files of each commit by its name."""
    named = ["--component", "native", "--component", "agreement", *more]
    outcome = run("export", checkout, *named)
    assert outcome.code == 0, outcome.out
    return {c["commit"]: set(c["files"]) for c in outcome.data["commits"]}


def test_the_commits_are_those_of_the_series(run: Run, checkout: Path) -> None:
    commits = export(run, checkout, "--out", "dspark")
    assert list(commits) == ["keep", "check"]
    assert commits["keep"] == {
        "python/sglang/srt/managers/relay.py",
        "python/sglang/srt/managers/relay_guard.py",
        f"docs/{PAGE}",
        "docs/docs.json",
    }
    assert commits["check"] == {
        "python/sglang/srt/agreement/rules.py",
        "python/sglang/srt/start.py",
        TEST_FILE,
        HELPER_THERE,
    }
    subjects = git(checkout, "log", "--format=%s", "--reverse", "master..dspark")
    assert subjects.splitlines() == [
        "[PD] Keep what nobody stored",
        "[PD] Check the settings",
    ]


def test_the_message_has_the_parts_of_a_pull_request(run: Run, checkout: Path) -> None:
    export(run, checkout, "--out", "dspark")
    body = git(checkout, "log", "-1", "--format=%b", "dspark")
    parts = [
        f"## {part}"
        for part in (
            "Motivation",
            "Modifications",
            "Accuracy Tests",
            "Speed Tests and Profiling",
            "Checklist",
        )
    ]
    places = [body.index(part) for part in parts]
    assert places == sorted(places)
    assert "Made up for a test." in body
    assert "Not measured: no part of this series was run on a GPU." in body
    assert f"python3 {TEST_FILE}" in body
    assert "`srt/start.py`: check the settings before anything starts" in body
    first = git(checkout, "log", "-1", "--format=%b", "dspark~1")
    assert "- [x] Documentation is updated." in first
    assert "- [ ] Documentation is updated." in body


def test_the_work_tree_is_left_alone(run: Run, checkout: Path) -> None:
    (checkout / "python/sglang/srt/start.py").write_text("work in progress\n")
    before = git(checkout, "status", "--short"), git(checkout, "rev-parse", "HEAD")
    export(run, checkout, "--out", "dspark")
    after = git(checkout, "status", "--short"), git(checkout, "rev-parse", "HEAD")
    assert after == before
    shown = git(checkout, "show", "dspark:python/sglang/srt/start.py")
    assert "check_settings(settings)" in shown


def test_upto_ends_the_series_early(run: Run, checkout: Path) -> None:
    assert list(export(run, checkout, "--out", "one", "--upto", "keep")) == ["keep"]
    outcome = run("export", checkout, "--upto", "keeb")
    assert (outcome.code, outcome.codes) == (2, ["U002"])
    assert "keep" in outcome.document["errors"][0]["expected"]


def test_lines_of_a_later_commit_come_with_it(
    run: Run, checkout: Path, overlay: Path
) -> None:
    guard = overlay / "srt/managers/relay_guard.py"
    old, later = "# export: only <1.1.0\nOLD = 1\n", "# export: from check\nLATER = 1\n"
    guard.write_text(guard.read_text() + "\n\n" + old + later)
    export(run, checkout, "--out", "dspark")
    path = "python/sglang/srt/managers/relay_guard.py"
    assert "LATER" not in git(checkout, "show", f"dspark~1:{path}")
    assert "LATER" in git(checkout, "show", f"dspark:{path}")
    assert "OLD" not in git(checkout, "show", f"dspark:{path}")
    assert "export:" not in git(checkout, "diff", "master", "dspark")
    body = git(checkout, "log", "-1", "--format=%b", "dspark")
    assert "- `srt/managers/relay_guard.py`: " in body


def test_helpers_lie_where_sglang_wants_no_registry_call(
    run: Run, checkout: Path
) -> None:
    export(run, checkout, "--out", "dspark")
    assert "X = 1" in git(checkout, "show", f"dspark:{HELPER_THERE}")
    test = git(checkout, "show", f"dspark:{TEST_FILE}")
    assert "from sglang.test.rule_fixtures import X" in test


def test_a_checkout_without_documentation_is_refused(run: Run, tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "other", docs="")
    outcome = run("export", root)
    assert (outcome.code, outcome.codes) == (3, ["T104"])
    found = outcome.document["errors"][0]["found"]
    assert "without docs/docs.json and docs_new/docs.json" in found


def test_a_navigation_without_the_neighbour_is_said(run: Run, tmp_path: Path) -> None:
    root = make_checkout(tmp_path / "other", navigation='{"pages": []}\n')
    outcome = run("export", root, "--component", "native", "--out", "dspark")
    (note,) = outcome.document["notes"]
    assert note.startswith("docs/docs.json has no entry docs/advanced_features/pd_dis")
    assert git(
        root, "diff", "--name-only", "master", "dspark", "--", "docs"
    ).split() == [f"docs/{PAGE}"]


@pytest.mark.parametrize("docs", ["docs", "docs_new"])
@pytest.mark.parametrize("comma", [",", ""])
def test_the_page_is_in_the_navigation(
    run: Run, tmp_path: Path, comma: str, docs: str
) -> None:
    neighbour = '"docs/advanced_features/pd_disaggregation"'
    following = '\n    "docs/other"' if comma else ""
    text = f'{{"pages": [\n    {neighbour}{comma}{following}\n]}}\n'
    root = make_checkout(tmp_path / "other", docs=docs, navigation=text)
    commits = export(run, root, "--out", "dspark")
    changed = {path for files in commits.values() for path in files}
    assert {path.split("/")[0] for path in changed} == {docs, "python", "test"}
    navigation = json.loads(git(root, "show", f"dspark:{docs}/docs.json"))
    assert navigation["pages"][1] == "docs/advanced_features/dspark_pd"
    assert len(navigation["pages"]) == 2 + bool(comma)


TEXT = """\
One.

{/* repository only */}

`pip install .`

{/* end of repository only */}

{/* export: from check */}

Two.

{/* end of export */}

{/* export: from empty */}

Three.

{/* end of export */}

| a |
|---|
| `dspark-pd status` {/* repository only */} |
| [b](dspark_pd_pp.mdx#rows) and [c](../advanced_features/dspark_pd.mdx#d) |
"""


def test_the_page_reads_as_one_of_sglangs(
    run: Run, checkout: Path, repository: Path
) -> None:
    (repository / OURS / PAGE).write_text(TEXT)
    export(run, checkout, "--out", "dspark")
    table = "| a |\n|---|\n| b and [c](/docs/advanced_features/dspark_pd#d) |\n"
    assert git(checkout, "show", f"dspark~1:docs/{PAGE}") == f"One.\n\n{table}"
    assert git(checkout, "show", f"dspark:docs/{PAGE}") == f"One.\n\nTwo.\n\n{table}"


@pytest.mark.parametrize("text", [OPEN, CLOSE, f"{OPEN}\n{OPEN}\n{CLOSE}"])
def test_parts_of_a_page_are_open_and_closed(text: str) -> None:
    with pytest.raises(ValueError, match="repository only"):
        for_sglang(text, set(), ())


def test_the_exported_page_needs_nothing_of_the_repository() -> None:
    """Neither the tool nor a script, and every link has its heading."""
    patch_set = load_patch_set()
    text = page_of(patch_set, [commit.name for commit in patch_set.series])
    assert text is not None
    for word in ("dspark-pd", "scripts/", "pip install", "{/*", "CHANGELOG", "doctor"):
        assert word not in text, word
    # What it is for is still there: both ways, and what was verified.
    for word in (
        "--speculative-algorithm DSPARK",
        "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE=1",
        "spec_accept_length",
        "/health",
        "not run |",
    ):
        assert word in text
    headings = {slug(found) for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", text):
        page, _, heading = link.partition("#")
        assert page in ("", "/" + PAGE.removesuffix(".mdx")), link
        assert not heading or heading in headings, link


def test_the_exported_page_has_every_variable_with_its_default() -> None:
    patch_set = load_patch_set()
    text = page_of(patch_set, [commit.name for commit in patch_set.series]) or ""
    declared = {
        line.split(" = ")[0].strip()
        for hunk in patch_set.hunks
        for line in hunk.data["fix"].splitlines()
        if " = Env" in line
    }
    assert len(declared) >= 6
    for name in declared:
        (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", text, re.MULTILINE)
        assert all(cell.strip() for cell in row.split("|")), name


def test_new_files_are_formatted(run: Run, checkout: Path) -> None:
    export(run, checkout, "--out", "dspark")
    assert "def test_it():" in git(checkout, "show", f"dspark:{TEST_FILE}")


@pytest.mark.parametrize(
    ("name", "hook"), [("ruff", "ruff-format"), ("black", "black")]
)
def test_the_checkout_names_its_formatter(
    run: Run, tmp_path: Path, name: str, hook: str
) -> None:
    root = make_checkout(
        tmp_path / "other", hooks=f"repos:\n- hooks:\n  - id: {hook}\n"
    )
    export(run, root, "--out", "dspark")
    body = git(root, "log", "-1", "--format=%b", "dspark")
    assert f"Formatted with {name} and isort." in body
    assert "def test_it():" in git(root, "show", f"dspark:{TEST_FILE}")


def test_a_file_that_upstream_did_not_format_is_not_reformatted(
    run: Run, tmp_path: Path
) -> None:
    root = make_checkout(tmp_path / "other")
    relay = root / "python/sglang/srt/managers/relay.py"
    relay.write_text(relay.read_text().replace("size = 8", "size  =  8"))
    git(root, "commit", "-qam", "unformatted")
    git(root, "tag", "-f", "v1.1.0")
    export(run, root, "--out", "dspark")
    diff = git(root, "diff", "master", "dspark", "--", "python/sglang/srt/managers")
    assert not [line for line in diff.splitlines() if line.startswith("-    ")]


def test_a_patch_applies_to_the_same_release(
    run: Run, checkout: Path, tmp_path: Path
) -> None:
    patch = tmp_path / "set.patch"
    export(run, checkout, "--out", patch)
    assert git(checkout, "branch", "--format=%(refname:short)").split() == ["master"]
    git(checkout, "am", "-q", "--keep-non-patch", stdin=patch.read_bytes())
    assert (checkout / TEST_FILE).is_file()
    subjects = git(checkout, "log", "--format=%s").splitlines()
    assert subjects == [
        "[PD] Check the settings",
        "[PD] Keep what nobody stored",
        "start",
    ]
    assert "## Motivation" in git(checkout, "log", "-1", "--format=%b")


def test_the_branch_survives_format_patch_and_a_cherry_pick(
    run: Run, checkout: Path
) -> None:
    export(run, checkout, "--out", "dspark")
    messages = git(checkout, "log", "--format=%B", "master..dspark")
    mail = git(checkout, "format-patch", "--stdout", "--keep-subject", "master..dspark")
    git(checkout, "checkout", "-q", "-b", "mailed")
    git(checkout, "am", "-q", "--keep", stdin=mail.encode())
    assert git(checkout, "log", "--format=%B", "master..mailed") == messages
    git(checkout, "checkout", "-q", "-b", "picked", "master")
    git(checkout, "cherry-pick", "master..dspark")
    assert git(checkout, "log", "--format=%B", "master..picked") == messages


def test_a_test_without_its_modules_stays_behind(run: Run, checkout: Path) -> None:
    outcome = run("export", checkout, "--component", "native", "--out", "dspark")
    (commit,) = outcome.data["commits"]
    assert TEST_FILE not in commit["files"]
    assert OTHER not in commit["files"]


def test_a_taken_branch_is_refused(run: Run, checkout: Path) -> None:
    export(run, checkout, "--out", "dspark")
    outcome = run("export", checkout, "--out", "dspark")
    assert (outcome.code, outcome.codes) == (2, ["U003"])


def test_a_folder_without_git_is_refused(run: Run, site: Path) -> None:
    outcome = run("export", site)
    assert (outcome.code, outcome.codes) == (3, ["T104"])


def test_a_set_without_its_tests_is_refused(
    run: Run, checkout: Path, repository: Path
) -> None:
    (repository / "test").rename(repository / "elsewhere")
    for words in (["export", checkout], ["list", "--check"]):
        outcome = run(*words)
        assert (outcome.code, outcome.codes) == (3, ["T104"])
        (error,) = outcome.document["errors"]
        assert "needs a clone of sglang-dspark-pd" in error["title"]
        assert error["next"].endswith("pip install -e . in the clone")


def test_a_missing_formatter_is_named_with_its_pin(
    run: Run, checkout: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = repository / "requirements" / "check.txt"
    pins.parent.mkdir()
    pins.write_text("black==1.2\nruff==3.4\n")
    monkeypatch.setattr(formatter.sys, "executable", str(checkout / "python3"))
    monkeypatch.setattr(formatter.shutil, "which", lambda name: None)
    outcome = run("export", checkout)
    assert (outcome.code, outcome.codes) == (6, ["F505"])
    (error,) = outcome.document["errors"]
    assert error["next"] in ("pip install ruff==3.4", "pip install black==1.2")


@pytest.mark.parametrize("out", ["bad branch", "a..b", "-x", "no/folder/x.patch"])
def test_an_output_that_cannot_be_is_refused(
    run: Run, checkout: Path, out: str
) -> None:
    before = git(checkout, "for-each-ref")
    outcome = run("export", checkout, f"--out={out}")
    assert (outcome.code, outcome.codes) == (2, ["U005"])
    (error,) = outcome.document["errors"]
    assert out in error["title"]
    given = error["next"].rpartition(" --out ")[2]
    assert given and given != out
    assert git(checkout, "for-each-ref") == before
    if not out.endswith(".patch"):
        assert run("export", checkout, "--out", given).code == 0


@pytest.mark.parametrize(
    ("name", "found"), [("none", "no folder"), ("file", "is a file")]
)
def test_a_target_that_is_not_a_folder_is_named(
    run: Run, tmp_path: Path, name: str, found: str
) -> None:
    (tmp_path / "file").write_text("")
    outcome = run("export", tmp_path / name)
    assert (outcome.code, outcome.codes) == (3, ["T104"])
    assert found in outcome.document["errors"][0]["found"]
