"""``export``: the set as a branch or patch in SGLang's own layout and form."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from packaging.version import Version

from dspark_pd.export.checkout import Checkout, open_checkout
from dspark_pd.export.contents import Exported
from dspark_pd.export.formatter import Formatter, formatter_for
from dspark_pd.export.message import compose
from dspark_pd.export.pages import (
    NAVIGATION,
    PAGE,
    docs_folder,
    page_of,
    verified_by,
    with_entry,
)
from dspark_pd.messages.errors import Refused, about, from_os_error, refuse
from dspark_pd.messages.output import a_path
from dspark_pd.messages.result import Result, count
from dspark_pd.patchset.lists import ON_REQUEST, Commit
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set
from dspark_pd.patchset.series import commit_of, up_to
from dspark_pd.planning.plan import Plan, make_plan
from dspark_pd.target import fsops
from dspark_pd.target.target import Target, find_target
from dspark_pd.verbs.context import (
    asked_components,
    need_clone,
    need_notes,
    refuse_any,
    refuse_assumption,
    refuse_name,
    unknown_release,
)

_PACKAGE = "python/sglang/"
_PATCH_SUFFIXES = (".patch", ".mbox")


def add_arguments(parser: ArgumentParser) -> None:
    text = "a git checkout of SGLang"
    parser.add_argument("checkout", type=a_path, metavar="DIR", help=text)
    text = "a new branch, or a file ending in .patch; default: dspark-pd-<release>"
    parser.add_argument("--out", type=a_path, metavar="BRANCH|FILE", help=text)
    text = "the last commit of the series to make, by its name in series.yml"
    parser.add_argument("--upto", metavar="COMMIT", help=text)


@dataclass(frozen=True)
class Step:
    """One commit of the series on its way into the checkout."""

    commit: Commit
    files: dict[str, bytes]
    message: str


@dataclass(frozen=True)
class Export:
    """What one run of the verb exports, and onto what."""

    patch_set: PatchSet
    target: Target
    checkout: Checkout
    formatter: Formatter
    docs: str

    def steps(self, series: Sequence[Commit]) -> list[Step]:
        """Plan each commit on top of those before it; skip what is empty here."""
        before: dict[str, bytes] = {}
        steps: list[Step] = []
        for index, commit in enumerate(series):
            made = [c.name for c in series[: index + 1]]
            plan = self._plan(made, [c.component for c in series[: index + 1]])
            exported = Exported(self.patch_set, self._release, made, plan)
            tests = exported.tests()
            files = self._formatted(exported, tests)
            new = {p: data for p, data in files.items() if before.get(p) != data}
            changed = {path.removeprefix(_PACKAGE) for path in new} & plan.files.keys()
            if not changed:
                continue
            if commit.component not in ON_REQUEST:
                new |= self._pages(made, before)
            message = self._message(commit, plan, changed, before, new, not steps)
            before |= new
            steps.append(Step(commit, new, message))
        return steps

    @property
    def _release(self) -> Version:
        assert self.target.release is not None
        return self.target.release

    def _plan(self, made: Sequence[str], components: Sequence[str]) -> Plan:
        plan = make_plan(
            up_to(self.patch_set, made),
            self._release,
            components,
            lambda path: self.checkout.read(_PACKAGE + path),
        )
        problem = unknown_release(self.patch_set, self._release, plan)
        refuse_any([problem] if problem else plan.problems)
        return plan

    def _formatted(
        self, exported: Exported, tests: dict[str, bytes]
    ) -> dict[str, bytes]:
        files = {}
        for path, file in exported.plan.files.items():
            data = file.desired
            if file.kind == "add":
                data = exported.text(self.patch_set.overlay / path)
            place = _PACKAGE + path
            files[place] = self.formatter.settle(place, file.original, data)
        for path, data in tests.items():
            files[path] = self.formatter.settle(path, None, data)
        return files

    def _pages(self, made: Sequence[str], before: dict[str, bytes]) -> dict[str, bytes]:
        """Return the page, where this commit changes it, and at first its entry."""
        text = page_of(self.patch_set, made)
        if text is None:
            return {}
        navigation = f"{self.docs}/{NAVIGATION}"
        pages = {f"{self.docs}/{PAGE}": text.encode("utf-8")}
        entry = with_entry(self.checkout.read(navigation) or b"")
        if entry is not None:
            pages[navigation] = entry
        return {path: data for path, data in pages.items() if before.get(path) != data}

    def _message(
        self,
        commit: Commit,
        plan: Plan,
        changed: Collection[str],
        before: dict[str, bytes],
        new: dict[str, bytes],
        is_first: bool,
    ) -> str:
        modules = [
            (module, _PACKAGE + module.path not in before)
            for module in self.patch_set.modules
            if module.path in changed
        ]
        hunks = [
            choice.hunk
            for choice in plan.choices
            if choice.verdict == "wanted"
            and commit_of(self.patch_set, choice.hunk) == commit
        ]
        verified = verified_by(self.patch_set, commit.name, is_first)
        return compose(commit, modules, hunks, new, verified, self.formatter.name)


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
    components = asked_components(options, patch_set.components, ())
    series = _chosen(patch_set, components, options.upto)
    docs = docs_folder(checkout)
    formatter = formatter_for(checkout, target.release, patch_set.repository)
    tip = checkout.head
    made = {}
    export = Export(patch_set, target, checkout, formatter, docs)
    for step in export.steps(series):
        tip = checkout.commit(tip, step.files, step.message)
        made[tip] = step
    if made:
        _write(checkout, tip, out)
    result = _describe(target, out, made)
    result.notes = need_notes(options, patch_set.components, components)
    navigation = f"{docs}/{NAVIGATION}"
    if made and not any(navigation in step.files for step in made.values()):
        result.notes.append(
            f"{navigation} has no entry docs/advanced_features/pd_disaggregation; name "
            f"{PAGE.removesuffix('.mdx')} there yourself"
        )
    return result


def _chosen(
    patch_set: PatchSet, components: Collection[str], last: str | None
) -> list[Commit]:
    """Return the commits of these components, in order, none behind ``last``."""
    names = [commit.name for commit in patch_set.series]
    if last is not None and last not in names:
        refuse_name("commit", last, names, "dspark-pd export -h")
    upto = len(names) if last is None else names.index(last) + 1
    return [c for c in patch_set.series[:upto] if c.component in components]


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


def _write(checkout: Checkout, tip: str, out: str) -> None:
    if not out.endswith(_PATCH_SUFFIXES):
        checkout.set_branch(out, tip)
        return
    try:
        fsops.write(Path(out).absolute(), checkout.patch(tip))
    except OSError as error:
        raise Refused([from_os_error(error)]) from error


def _describe(target: Target, out: str, made: dict[str, Step]) -> Result:
    lines = []
    for sha, step in made.items():
        lines.append(
            f"{sha[:10]}  {count(len(step.files), 'file'):>9}  {step.commit.name:18}"
            f"{step.commit.title}"
        )
    kind = "patch" if out.endswith(_PATCH_SUFFIXES) else "branch"
    lines.append(f"{kind} {out}: {count(len(made), 'commit')}")
    data = {
        "kind": kind,
        "out": out,
        "commits": [
            {
                "sha": sha,
                "commit": step.commit.name,
                "step": step.commit.step,
                "component": step.commit.component,
                "files": sorted(step.files),
            }
            for sha, step in made.items()
        ],
    }
    return Result(target=target, lines=lines, data=data)
