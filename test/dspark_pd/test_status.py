"""``status``, ``diff`` and ``list`` tell what is, what would be and why."""

from __future__ import annotations

from pathlib import Path

import pytest

import fake_sglang
from dspark_pd.patchset.lists import ReleaseRange
from outcome import Outcome, Run

pytestmark = pytest.mark.unit


def states(outcome: Outcome) -> dict[str, str]:
    return {row["id"]: row["state"] for row in outcome.data["hunks"]}


def test_needed_then_applied(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.1.0")
    before = run("status", "--target", site)
    assert before.code == 1
    assert set(states(before).values()) == {"needed"}
    run("apply", "--target", site)
    after = run("status", "--target", site)
    assert after.code == 0
    assert set(states(after).values()) == {"applied"}


def test_hunks_are_counted_and_listed_on_request(run: Run, site: Path) -> None:
    def shown(*more: str) -> list[str]:
        given = ["status", "--target", site, "--component", "all", *more]
        return run(*given, text=True).out.splitlines()[1:]

    run("apply", "--target", site)
    assert shown() == [
        "component  applied  needed  not needed",
        "native           1       -           -",
        "agreement        -       -           1",
        "cpu              -       1           -",
        "",
        "hunks: 1 applied, 1 needed, 1 not needed; modules: 2 of 2",
    ]
    listed = shown("-v")
    assert listed[: len(shown())] == shown()
    for identity in ("relay.keep-input", "start.check-settings"):
        assert any(identity in line for line in listed)
    (needed,) = [line for line in listed if line.startswith("needed")]
    assert needed.split() == ["needed", "cpu", "devices.accept-named", "srt/devices.py"]


def test_what_needs_attention_is_listed_and_fits_a_screen(
    run: Run, site: Path, overlay: Path
) -> None:
    fake_sglang.install(site, "1.1.0")
    hunks = overlay / "srt/managers/relay.py.hunks.yml"
    many = [
        fake_sglang.hunk(id=f"relay.keep-input-{index}", function="nowhere")
        for index in range(40)
    ]
    hunks.write_text("---\n".join(many))
    out = run("status", "--target", site, text=True).out
    assert len(out.splitlines()) <= 24
    assert "conflict" in out and "... and 28 more; -v lists all" in out


def test_a_hunk_that_upstream_has_is_shown_with_its_release(
    run: Run, site: Path
) -> None:
    outcome = run("status", "--target", site)
    rows = {row["id"]: row for row in outcome.data["hunks"]}
    row = rows["start.check-settings"]
    assert (row["state"], row["detail"]) == ("not needed", "not needed since 1.2.0")
    run("apply", "--target", site)
    start = (site / "sglang/srt/start.py").read_text()
    assert "check_settings" not in start


@pytest.mark.parametrize(
    ("condition", "dropped"),
    [
        ('{release: ">=1.2.0"}', True),
        ('{release: ">=1.3.0"}', False),
        ('{symbol: "srt/start.py::check"}', True),
        ('{symbol: "srt/start.py::checks"}', False),
        ('{symbol: "srt/managers/relay.py::Relay.size"}', True),
        ('{symbol: "srt/managers/relay.py::Spare.store"}', False),
        ('{symbol: "srt/nowhere.py::check"}', False),
        ('{match: "places = batch.places()"}', True),
        ('{match: "places = batch.spots()"}', False),
        (fake_sglang.REVIEW, False),
    ],
)
def test_drop_conditions_are_answered_by_the_target(
    run: Run, site: Path, overlay: Path, condition: str, dropped: bool
) -> None:
    hunks = overlay / "srt/managers/relay.py.hunks.yml"
    text = hunks.read_text()
    first, _, rest = text.partition("\n---\n")
    first = first.replace(fake_sglang.REVIEW, condition)
    hunks.write_text(f"{first}\n---\n{rest}")
    for verb in ("status", "apply", "status"):
        outcome = run(verb, "--target", site)
        if verb == "status":
            state = states(outcome)["relay.keep-input"]
            assert (state == "not needed") == dropped


def test_our_own_symbol_does_not_count_as_upstreams(
    run: Run, site: Path, overlay: Path
) -> None:
    """Else a hunk would declare itself unneeded as soon as it is applied."""
    hunks = overlay / "srt/managers/relay.py.hunks.yml"
    review = fake_sglang.REVIEW
    symbol = '{symbol: "srt/managers/relay_guard.py::nothing_stored"}'
    hunks.write_text(hunks.read_text().replace(review, symbol))
    for _ in range(2):
        assert run("apply", "--target", site).code == 0
        assert states(run("status", "--target", site))["relay.keep-input"] == "applied"


def test_a_conflict_is_shown_at_its_hunk_only(run: Run, site: Path) -> None:
    fake_sglang.install(site, "1.1.0")
    (site / "sglang/srt/managers/relay.py").write_text("class Relay:\n    pass\n")
    outcome = run("status", "--target", site)
    assert outcome.code == 4
    found = states(outcome)
    assert found["relay.keep-input"] == "conflict"
    assert found["start.check-settings"] == "needed"


def test_an_older_release_than_the_hunk_is_not_applicable(
    run: Run, site: Path, overlay: Path
) -> None:
    hunks = overlay / "srt/devices.py.hunks.yml"
    hunks.write_text(hunks.read_text().replace(">=1.0.0,<1.3.0", ">=1.2.0,<1.3.0"))
    fake_sglang.install(site, "1.1.0")
    outcome = run("status", "--target", site, "--component", "all")
    assert states(outcome)["devices.accept-named"] == "not applicable"
    rows = {row["id"]: row["detail"] for row in outcome.data["hunks"]}
    assert rows["devices.accept-named"] == "from 1.2.0"


def test_diff_shows_what_is_pending(run: Run, site: Path) -> None:
    outcome = run("diff", "--target", site)
    assert outcome.code == 1
    text = outcome.data["files"]["srt/managers/relay.py"]
    added = [line for line in text.splitlines() if line.startswith("+")]
    removed = [line for line in text.splitlines() if line.startswith("-")]
    assert len(added) == 5, "four lines and the header"
    assert len(removed) == 1, "the header alone"
    run("apply", "--target", site)
    assert run("diff", "--target", site).code == 0


def test_list_tells_why_a_hunk_exists(run: Run) -> None:
    outcome = run("list", "relay.keep-input", text=True)
    for part in ("why", "upstream", "drop when", "proved by", "releases"):
        assert part in outcome.out
    assert "relay.keep-input@1.0.0" in outcome.out


def test_ranges_start_with_their_lower_bound() -> None:
    for text in (">=0.5.16,<0.5.24", "<0.5.24,>=0.5.16"):
        assert str(ReleaseRange(text)) == ">=0.5.16,<0.5.24"


def test_list_counts_identities_not_variants(run: Run) -> None:
    ids = [item["id"] for item in run("list").data["hunks"]]
    assert sorted(ids) == [
        "devices.accept-named",
        "relay.keep-input",
        "start.check-settings",
    ]
    assert [i["id"] for i in run("list", "--component", "cpu").data["hunks"]] == [
        ids[0]
    ]


def test_status_at_length_says_why_and_until_when(run: Run, site: Path) -> None:
    brief = run("status", "--target", site, text=True)
    loud = run("status", "--target", site, "-v", text=True)
    assert loud.out.startswith(brief.out)
    assert "(since 1.2.0)" in loud.out and "(not needed" not in loud.out
    assert "relay.keep-input  Keep what nobody stored" in loud.out
    assert "drop when symbol: srt/start.py::check" in loud.out


def test_list_names_files_and_releases(run: Run) -> None:
    lines = run("list", text=True).out.splitlines()
    (line,) = [line for line in lines if "start.check-settings" in line]
    assert "1.0.0 to 1.1.0" in line and " srt/start.py " in line


def test_list_counts_what_it_shows(run: Run) -> None:
    def last(*given: str) -> str:
        return run("list", *given, text=True).out.splitlines()[-1]

    one = "1 hunk on 1 file, 0 modules, SGLang"
    assert last("srt/start.py") == f"{one} 1.0.0 to 1.1.0"
    assert last("--component", "cpu") == f"{one} 1.0.0 to 1.2.0"


@pytest.mark.parametrize("prefix", ["", "sglang/", "python/sglang/"])
def test_list_of_one_file(run: Run, prefix: str) -> None:
    outcome = run("list", f"{prefix}srt/start.py")
    assert [hunk["id"] for hunk in outcome.data["hunks"]] == ["start.check-settings"]
    assert outcome.data["modules"] == []
    module = run("list", f"{prefix}srt/agreement/rules.py")
    assert [m["component"] for m in module.data["modules"]] == ["agreement"]
    assert module.data["hunks"] == []
