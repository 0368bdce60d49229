"""A wrong record is refused when it is read, with its place and its field."""

from __future__ import annotations

from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.messages.errors import Refused
from dspark_pd.patchset import hygiene
from dspark_pd.patchset.fields import wrong_fields
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set
from dspark_pd.patchset.yaml_documents import load_documents
from outcome import Run

pytestmark = pytest.mark.unit


def load(overlay: Path, text: str) -> PatchSet:
    (overlay / "srt/managers/relay.py.hunks.yml").write_text(text)
    return load_patch_set(overlay)


def refusal(overlay: Path, text: str) -> Refused:
    with pytest.raises(Refused) as caught:
        load(overlay, text)
    return caught.value


VALID = fake_sglang.hunk()


def test_the_valid_one_is_valid(overlay: Path) -> None:
    assert load(overlay, VALID).identities["relay.keep-input"]


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("id", "relay.keep-input", "keep-input"),
        ("id", "relay.keep-input", "relay/keep-input"),
        ("id", "relay.keep-input", "relay.keep"),
        ("id", "relay.keep-input", "relay.keep-input@main"),
        ("language", "language: python", "language: rust"),
        ("message", "Keep what nobody stored", "x" * 81),
        ("note", "Made up for a test.", "\n  ".join("1234567")),
        ("url", "https://github.com", "https://example.org"),
        ("severity", "severity: hint", "severity: error"),
        ("rule", "rule:", "rules:"),
        ("rules", "rule:", "rules:"),
        ("fix", "fix: |-\n  $ANCHOR", "fix: ''"),
        ("metadata.kind", "kind: fix", "kind: hack"),
        ("metadata.component", "component: native", "component: gpu"),
        ("metadata.releases", '">=1.1.0,<1.3.0"', '"1.1.0 and later"'),
        ("metadata.releases", '">=1.1.0,<1.3.0"', "1.1"),
        ("metadata.expect", "expect: 1", "expect: 0"),
        ("metadata.expect", "expect: 1", "expect: true"),
        ("metadata.forwarded", 'forwarded: "no"', "forwarded: false"),
        ("metadata.forwarded", 'forwarded: "no"', "forwarded: soon"),
        ("metadata.forwarded", 'forwarded: "no"', 'forwarded: "not-needed: "'),
        ("metadata.drop_when", "review: ", "someday: "),
        ("metadata.drop_when", "review: ", "release: "),
        ("metadata.drop_when", "review: ", "symbol: "),
        ("metadata.drop_when", '{review: "https', '{review: "http'),
        ("metadata.drop_when", '{review: "https', '{match: "", review: "https'),
        ("metadata.calls", "sglang.srt.managers.relay_guard", "relay_guard"),
        ("metadata.proved_by", "test/dspark_pd/", "dspark_pd/"),
        ("metadata.proved_by", "::test_apply_inserts_our_lines", ""),
        ("metadata.reason", "  expect: 1", "  expect: 1\n  reason: none"),
    ],
)
def test_a_wrong_field_is_named(overlay: Path, field: str, old: str, new: str) -> None:
    assert old in VALID
    problems = refusal(overlay, VALID.replace(old, new)).problems
    assert {problem.code for problem in problems} == {"S202"}
    assert field in {problem.fields["field"] for problem in problems}
    assert problems[0].fields["line"] == 1


@pytest.mark.parametrize(
    "field",
    [
        *("id", "language", "message", "note", "severity", "metadata", "rule", "fix"),
        *("metadata.kind", "metadata.component", "metadata.releases"),
        *("metadata.forwarded", "metadata.drop_when", "metadata.proved_by"),
    ],
)
def test_a_missing_field_is_named(overlay: Path, field: str) -> None:
    (document,) = load_documents(_file(overlay, VALID), "x")
    group, _, name = field.rpartition(".")
    del (document.data[group] if group else document.data)[name]
    assert field in {name for name, _, _ in wrong_fields(document.data, ["native"])}


def _file(overlay: Path, text: str) -> Path:
    path = overlay / "srt/managers/relay.py.hunks.yml"
    path.write_text(text)
    return path


def test_the_second_document_is_named_by_its_line(overlay: Path) -> None:
    text = f"{VALID}---\n{VALID.replace('kind: fix', 'kind: hack')}"
    (problem,) = refusal(overlay, text).problems
    assert problem.fields["line"] == VALID.count("\n") + 2


def test_a_repeated_key_is_refused(overlay: Path) -> None:
    text = VALID.replace("  expect: 1\n", "  expect: 1\n  expect: 2\n")
    (problem,) = refusal(overlay, text).problems
    assert problem.code == "S201"
    assert "expect is given twice" in problem.part("found")


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((">=1.0.0,<1.2.0", ">=1.1.0,<1.3.0"), "at most one variant"),
        ((">=1.0.0,<1.1.0", ">=1.2.0,<1.3.0"), "one unbroken run"),
        ((">=2.0.0",), "a release that is known"),
    ],
)
def test_ranges_of_variants_fit_together(
    overlay: Path, ranges: tuple[str, ...], message: str
) -> None:
    documents = [
        fake_sglang.hunk(id=f"relay.keep-input@1.{index}.0", releases=text)
        for index, text in enumerate(ranges)
    ]
    (problem,) = refusal(overlay, "---\n".join(documents)).problems
    assert message in problem.part("expected")


def test_the_lists_are_checked_too(run: Run, overlay: Path) -> None:
    path = overlay / "overlay.yml"
    text = path.read_text()
    wrong = [
        text.replace("component: native", "component: gpu"),
        text.replace("  what: says", "  why: says"),
        text.replace('">=1.0.0,<1.3.0"', '"all"'),
        "modules: none",
    ]
    for changed in wrong:
        path.write_text(changed)
        outcome = run("list")
        assert (outcome.code, outcome.codes) == (4, ["S202"])
    path.write_text(text)
    (overlay / "releases.yml").write_text("[]")
    assert run("list").codes == ["S202"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("needs: [native]", "needs: [handoff]"),
        ("needs: [native]", "needs: [gpu]"),
        ("needs: [native]", "needs: native"),
        ("needs: [native]", "need: [native]"),
        ("title: Keep", "name: Keep"),
    ],
)
def test_a_wrong_component_is_refused(
    run: Run, overlay: Path, old: str, new: str
) -> None:
    path = overlay / "components.yml"
    path.write_text(path.read_text().replace(old, new, 1))
    assert run("list").codes == ["S202"]
    path.unlink()
    assert run("list").codes == ["S202"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("component: native", "component: gpu"),
        ("motivation: Made up", "motive: Made up"),
        ("name: check", "name: keep"),
    ],
)
def test_a_wrong_commit_is_refused(run: Run, overlay: Path, old: str, new: str) -> None:
    path = overlay / "series.yml"
    path.write_text(path.read_text().replace(old, new, 1))
    assert run("list").codes == ["S202"]


def test_list_counts_drop_conditions_that_a_program_decides(run: Run) -> None:
    listed = run("list").data
    assert (listed["decidable"], len(listed["hunks"])) == (1, 3)


def _whats(overlay: Path) -> str:
    problems = hygiene.check(load_patch_set(overlay))
    return "\n".join(problem.as_text() for problem in problems)


def test_where_a_commit_is_missing_is_said(overlay: Path, repository: Path) -> None:
    """A component of several commits: a module has to name its own."""
    series = overlay / "series.yml"
    text = series.read_text()
    more = text.partition("- name: check")[0].replace("name: keep", "name: keep-more")
    series.write_text(more + text)
    whats = _whats(overlay)
    assert "the commit of srt/managers/relay_guard.py" in whats
    assert "commit in overlay.yml: one of keep-more, keep (series.yml)" in whats
    modules = overlay / "overlay.yml"
    named = "component: native\n  commit: keep-more"
    modules.write_text(modules.read_text().replace("component: native", named))
    assert _whats(overlay) == ""
    # What a component needs may come with it, and nothing of it comes before.
    modules.write_text(modules.read_text().replace("keep-more", "check"))
    assert "the commit of srt/managers/relay_guard.py" not in _whats(overlay)
    early = "component: agreement\n  commit: keep"
    modules.write_text(modules.read_text().replace("component: agreement", early))
    assert "one of component agreement" in _whats(overlay)


@pytest.fixture
def repository(overlay: Path) -> Path:
    """A repository in which the fake set is consistent."""
    root = overlay.parent.parent
    proof = root / "test/dspark_pd/test_apply_revert.py"
    proof.parent.mkdir(parents=True)
    proof.write_text("def test_apply_inserts_our_lines():\n    pass\n")
    return root


def test_a_consistent_set_has_no_problems(overlay: Path, repository: Path) -> None:
    assert _whats(overlay) == ""


def test_an_unlisted_module_is_found(overlay: Path, repository: Path) -> None:
    (overlay / "srt/managers/stray.py").write_text("")
    assert "srt/managers/stray.py" in _whats(overlay)


def test_a_listed_module_that_is_gone_is_found(overlay: Path, repository: Path) -> None:
    (overlay / "srt/agreement/rules.py").unlink()
    found = _whats(overlay)
    assert "the module in the overlay" in found
    assert "calls of start.check-settings" in found


def test_an_import_outside_the_needs_is_found(overlay: Path, repository: Path) -> None:
    components = overlay / "components.yml"
    components.write_text(components.read_text().replace("  needs: [native]\n", "", 1))
    found = _whats(overlay)
    assert "srt/agreement/rules.py imports srt/managers/relay_guard.py" in found
    assert "native in the needs of agreement" in found


def test_an_import_on_a_release_without_it_is_found(
    overlay: Path, repository: Path
) -> None:
    modules = overlay / "overlay.yml"
    text = modules.read_text()
    modules.write_text(text.replace(">=1.0.0,<1.3.0", ">=1.1.0,<1.3.0", 1))
    assert "a range of srt/managers/relay_guard.py with 1.0.0" in _whats(overlay)


def test_an_orphan_module_is_found(overlay: Path, repository: Path) -> None:
    (overlay / "srt/orphan.py").write_text("")
    entry = '- {path: srt/orphan.py, component: cpu, releases: ">=1.0.0", what: x'
    modules = overlay / "overlay.yml"
    text = modules.read_text()
    modules.write_text(f"{text}{entry}}}\n")
    assert "an orphan" in _whats(overlay)
    modules.write_text(f"{text}{entry}, reached_by: a registry}}\n")
    assert _whats(overlay) == ""


def test_a_call_that_does_not_exist_is_found(overlay: Path, repository: Path) -> None:
    hunks = overlay / "srt/start.py.hunks.yml"
    hunks.write_text(hunks.read_text().replace("rules.check_settings", "rules.checks"))
    found = _whats(overlay)
    assert "a function of an overlay module" in found
    assert "a call of checks in fix" in found


@pytest.mark.parametrize(
    ("text", "exists"),
    [
        ("class TestIt:\n    def test_one(self):\n        pass\n", True),
        ("class TestIt:\n    def test_two(self):\n        pass\n", False),
        ("class TestIt:\n    pass\n\n\ndef test_one():\n    pass\n", False),
        (
            "class Shared:\n    def test_one(self):\n        pass\n\n\n"
            "class TestIt(Shared):\n    pass\n",
            True,
        ),
        ("", False),
    ],
)
def test_a_proof_must_exist(
    overlay: Path, repository: Path, text: str, exists: bool
) -> None:
    for path in overlay.rglob("*.hunks.yml"):
        old = "test/dspark_pd/test_apply_revert.py::test_apply_inserts_our_lines"
        path.write_text(path.read_text().replace(old, "test/a.py::TestIt::test_one"))
    (repository / "test/a.py").write_text(text)
    assert ("a test that exists" not in _whats(overlay)) == exists


def test_the_upstream_trail_is_reasoned(overlay: Path, repository: Path) -> None:
    hunks = overlay / "srt/start.py.hunks.yml"
    url = "url: https://github.com/sgl-project/sglang/issues/1\n"
    hunks.write_text(hunks.read_text().replace(url, ""))
    assert "the upstream trail of start.check-settings" in _whats(overlay)
    text = hunks.read_text()
    hunks.write_text(text.replace('forwarded: "no"', 'forwarded: "not-needed: ours"'))
    assert _whats(overlay) == ""


def test_a_large_fix_is_found(overlay: Path, repository: Path) -> None:
    hunks = overlay / "srt/start.py.hunks.yml"
    many = "".join(f"  line_{index}()\n" for index in range(11))
    hunks.write_text(hunks.read_text().replace("  $ANCHOR", f"{many}  $ANCHOR"))
    assert "at most 10 inserted lines" in _whats(overlay)
