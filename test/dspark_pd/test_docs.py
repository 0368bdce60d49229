"""Documentation: every link has its page and heading, every page is in the navigation."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_pd.cli import _OWN_OPTIONS, _VERBS, build_parser
from dspark_pd.measure.diagnosis import CAUSES

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs_new"
PAGES = sorted(DOCS.rglob("*.mdx"))
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The id that a heading gets: lower case, no punctuation, hyphens for spaces."""
    kept = re.sub(r"[^\w\s-]", "", heading.lower())
    return re.sub(r"\s", "-", kept.strip())


def headings(page: Path) -> set[str]:
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {slug(found) for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """(link, page it names, heading it names or "") of each link inside the repository."""
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        name, _, heading = link.partition("#")
        yield link, page.parent / name if name else page, heading


@pytest.mark.parametrize(
    "page", [*PAGES, *REPOSITORY.glob("*.md")], ids=lambda path: path.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link, target, heading in links(page):
        assert not link.startswith("/"), f"{link} works on the site only"
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def test_every_page_is_in_the_navigation() -> None:
    navigation = json.loads((DOCS / "docs.json").read_text())["navigation"]
    listed = [page for group in navigation["groups"] for page in group["pages"]]
    found = [str(page.relative_to(DOCS).with_suffix("")) for page in PAGES]
    assert sorted(listed) == sorted(found)


def test_every_script_is_on_the_page_for_contributors() -> None:
    page = DOCS / "docs/developer_guide/dspark_pd_working.mdx"
    text = page.read_text(encoding="utf-8")
    scripts = [*(REPOSITORY / "scripts").glob("*.sh")]
    scripts += (REPOSITORY / "scripts").glob("*.py")
    started = [path for path in scripts if path.read_text().startswith("#!")]
    for script in started:
        assert f"`{script.name}`" in text, script.name


def test_the_plot_is_of_the_numbers_beside_it() -> None:
    images = DOCS / "images"
    data = (images / "dspark_pd_tail.json").read_bytes()
    points = json.loads(data)["points"]
    drawn = (images / "dspark_pd_tail.svg").read_text()
    digest = hashlib.sha256(data).hexdigest()
    assert f">dspark_pd_tail.json sha256:{digest}<" in drawn, (
        "draw it with plot_tail.py"
    )
    for label in {f"prompt of {point['prompt_tokens']} tokens" for point in points}:
        assert label in drawn
    for draft in {point["draft"] for point in points}:
        assert f"{draft} draft" in drawn


def test_the_plot_of_steps_is_of_the_numbers_beside_it() -> None:
    data = (DOCS / "images" / "dspark_pd_steps.json").read_bytes()
    drawn = (DOCS / "images" / "dspark_pd_steps.svg").read_text()
    digest = hashlib.sha256(data).hexdigest()
    assert f"dspark_pd_steps.json sha256:{digest}<" in drawn
    runs = json.loads(data)["runs"]
    assert all(f">{name}</text>" in drawn for name in runs)
    # What the page says of them.
    for name in ("native", "tail"):
        steps = runs[name]["by_step"].values()
        assert {step["ratio"] for step in steps if "ratio" in step} == {1.0}
    behind = runs["no context"]["by_step"]
    assert round(behind["16"]["ratio"], 2) == 0.66
    assert round(behind["17+"]["ratio"], 2) == 0.99
    assert round(runs["no context"]["ratio"], 2) == 0.66
    [finding] = runs["no context"]["findings"]
    assert finding["code"] == "MEASURE-HANDOFF"


def test_every_cause_is_on_the_page_of_the_tool() -> None:
    page = (DOCS / "docs/developer_guide/dspark_pd_tool.mdx").read_text()
    assert [code for code in CAUSES if f"`{code}`" not in page] == []


def test_every_option_of_every_verb_is_in_the_reference() -> None:
    page = (DOCS / "docs/developer_guide/dspark_pd_tool.mdx").read_text()
    assert set(_OWN_OPTIONS) < set(_VERBS)
    for verb in set(_VERBS) - {"demo"}:
        _, _, section = page.partition(f"\n### {verb}\n\n```\n")
        section, _, _ = section.partition("\n```\n")
        verbs = build_parser(verb)._subparsers._group_actions[0].choices  # type: ignore[union-attr]
        options = {
            name
            for action in verbs[verb]._actions  # type: ignore[index, call-overload]
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        }
        missing = options - set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", section))
        assert not missing, verb


def test_a_covering_tail_loses_nothing() -> None:
    """What the page says of the sliding draft is in its numbers."""
    points = json.loads((DOCS / "images" / "dspark_pd_tail.json").read_text())["points"]
    steps = {
        (point["tail"], point["prompt_tokens"]): point["verify_steps"]
        for point in points
        if point["draft"] == "sliding"
    }
    for tail, name in steps:
        if tail is not None and tail >= 31:
            assert steps[tail, name] == steps[None, name]
    assert any(steps[8, name] > steps[None, name] for _, name in steps)
