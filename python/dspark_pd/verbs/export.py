"""``export``: the set as a branch or patch in SGLang's own layout and form."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dspark_pd.export.checkout import Checkout, open_checkout
from dspark_pd.export.contents import NAVIGATION, docs_of, tests_of
from dspark_pd.export.formatter import Formatter, formatter_for
from dspark_pd.export.message import compose
from dspark_pd.messages.errors import Refused, about, from_os_error, refuse
from dspark_pd.messages.output import a_path
from dspark_pd.messages.result import Result, count
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set
from dspark_pd.planning.plan import Plan, make_plan
from dspark_pd.target import fsops
from dspark_pd.target.target import Target, find_target
from dspark_pd.verbs.context import (
    asked_components,
    need_clone,
    need_notes,
    refuse_any,
    refuse_assumption,
    unknown_release,
)

_PACKAGE = "python/sglang/"
_PATCH_SUFFIXES = (".patch", ".mbox")


def add_arguments(parser: ArgumentParser) -> None:
    text = "a git checkout of SGLang"
    parser.add_argument("checkout", type=a_path, metavar="DIR", help=text)
    text = "a new branch, or a file ending in .patch; default: dspark-pd-<release>"
    parser.add_argument("--out", type=a_path, metavar="BRANCH|FILE", help=text)


@dataclass(frozen=True)
class Commit:
    """One component on its way into the checkout."""

    component: str
    files: dict[str, bytes]
    message: str


def run(options: Namespace) -> Result:
    checkout = open_checkout(Path(options.checkout))
    target = find_target(str(checkout.root), options.assume_version)
    with about(target):
        return _export(options, checkout, target)


def _export(options: Namespace, checkout: Checkout, target: Target) -> Result:
    if target.release is None:
        refuse("T102", target=target.root)
    patch_set = load_patch_set(options.overlay)
    refuse_assumption(patch_set, target, options.assume_version)
    need_clone(patch_set, "export")
    out = options.out or f"dspark-pd-{target.release}"
    _need_free(checkout, out)
    formatter = formatter_for(checkout, target.release, patch_set.repository)
    components = asked_components(options, patch_set.components, ())
    commits = _commits(patch_set, target, checkout, components, formatter)
    tip = checkout.head
    made = {}
    for commit in commits:
        tip = checkout.commit(tip, commit.files, commit.message)
        made[tip] = commit
    if made:
        _write(checkout, tip, out)
    result = _describe(target, out, made)
    result.notes = need_notes(options, patch_set.components, components)
    return result


def _need_free(checkout: Checkout, out: str) -> None:
    if out.endswith(_PATCH_SUFFIXES):
        folder = Path(out).absolute().parent
        if Path(out).exists():
            refuse("U003", name=f"file {out}", hint=f"rm {shlex.quote(out)}")
        if not folder.is_dir():
            wanted, found = "a folder that exists", f"no folder {folder}"
            _refuse_out(checkout, out, wanted, found, Path(out).name)
    elif not checkout.takes_branch(out):
        wanted = "a name that git takes for a branch, or a file ending in .patch"
        give = re.sub(r"[^\w/]+", "-", out, flags=re.A).strip("-/") or "dspark-pd"
        _refuse_out(checkout, out, wanted, "a name that git does not take", give)
    elif checkout.has_branch(out):
        hint = f"git -C {shlex.quote(str(checkout.root))} branch -D {out}"
        refuse("U003", name=f"branch {out}", hint=hint)


def _refuse_out(
    checkout: Checkout, out: str, wanted: str, found: str, give: str
) -> NoReturn:
    root = shlex.quote(str(checkout.root))
    refuse("U005", name=out, wanted=wanted, found=found, give=give, checkout=root)


def _commits(
    patch_set: PatchSet,
    target: Target,
    checkout: Checkout,
    components: tuple[str, ...],
    formatter: Formatter,
) -> list[Commit]:
    """Plan each component on top of those before it; skip what is empty here."""
    assert target.release is not None
    before: dict[str, bytes] = {}
    commits = []
    for index, component in enumerate(components):
        plan = make_plan(
            patch_set,
            target.release,
            components[: index + 1],
            lambda path: checkout.read(_PACKAGE + path),
        )
        problem = unknown_release(patch_set, target.release, plan)
        refuse_any([problem] if problem else plan.problems)
        tests = tests_of(patch_set, component, plan)
        files = _formatted(plan, tests, formatter)
        new = {path: data for path, data in files.items() if before.get(path) != data}
        before.update(files)
        touched = {path.removeprefix(_PACKAGE) for path in new}
        if any(path in plan.files for path in touched):
            purpose = patch_set.components[component]
            modules = [m for m in patch_set.modules if m.path in touched]
            hunks = [
                choice.hunk
                for choice in plan.choices
                if choice.verdict == "wanted" and choice.hunk.component == component
            ]
            message = compose(purpose, modules, hunks, tests, formatter.name)
            commits.append(Commit(component, new, message))
    if commits:
        docs = docs_of(patch_set, checkout.read(NAVIGATION))
        commits[-1].files.update(docs)
    return commits


def _formatted(
    plan: Plan, tests: dict[str, bytes], formatter: Formatter
) -> dict[str, bytes]:
    files = {
        _PACKAGE + path: formatter.settle(_PACKAGE + path, file.original, file.desired)
        for path, file in plan.files.items()
    }
    files |= {path: formatter.settle(path, None, data) for path, data in tests.items()}
    return files


def _write(checkout: Checkout, tip: str, out: str) -> None:
    if not out.endswith(_PATCH_SUFFIXES):
        checkout.set_branch(out, tip)
        return
    try:
        fsops.write(Path(out).absolute(), checkout.patch(tip))
    except OSError as error:
        raise Refused([from_os_error(error)]) from error


def _describe(target: Target, out: str, made: dict[str, Commit]) -> Result:
    lines = []
    for sha, commit in made.items():
        title = commit.message.partition("\n")[0]
        lines.append(f"{sha[:10]}  {count(len(commit.files), 'file'):>9}  {title}")
    kind = "patch" if out.endswith(_PATCH_SUFFIXES) else "branch"
    lines.append(f"{kind} {out}: {count(len(made), 'commit')}")
    data = {
        "kind": kind,
        "out": out,
        "commits": [
            {
                "sha": sha,
                "component": commit.component,
                "files": sorted(commit.files),
            }
            for sha, commit in made.items()
        ],
    }
    return Result(target=target, lines=lines, data=data)
