"""Work out, in memory, what a target looks like with the set on it.

``make_plan`` reads originals, asks ast-grep once, counts the matches, splices
the added lines and compiles every result. It writes nothing and stops at no problem: a
user learns of all of them at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import Version

from dspark_pd.messages.errors import Problem, Refused
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.patch_set import PatchSet
from dspark_pd.planning import astgrep
from dspark_pd.planning.astgrep import Match
from dspark_pd.planning.insertion import Edit, normalise, splice
from dspark_pd.planning.matching import edits_of_choice, unrecorded
from dspark_pd.planning.selection import (
    Choice,
    Originals,
    candidates,
    choose,
    drop_rule,
    judged,
    modules_for,
)


@dataclass(frozen=True)
class PlannedFile:
    """One file as upstream has it and as the set wants it."""

    path: str
    kind: Literal["add", "hunk"]
    original: bytes | None
    desired: bytes
    hunks: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()

    @property
    def added_lines(self) -> int:
        old = self.original.count(b"\n") if self.original else 0
        return self.desired.count(b"\n") - old


@dataclass
class Plan:
    """Planned files by path, one choice per identity, and what stands in the way."""

    files: dict[str, PlannedFile] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    unfit: dict[str, Problem] = field(default_factory=dict)
    """Why an identity that is wanted cannot be applied."""
    problems: list[Problem] = field(default_factory=list)

    def idle_components(self) -> dict[str, str]:
        """Return components that the release is too old for: what they do serve."""
        since: dict[str, list[str]] = {}
        busy = set()
        for choice in self.choices:
            if choice.verdict == "not applicable":
                since.setdefault(choice.hunk.component, []).append(choice.detail)
            else:
                busy.add(choice.hunk.component)
        return {name: told[0] for name, told in since.items() if name not in busy}


def make_plan(
    patch_set: PatchSet,
    release: Version,
    components: Iterable[str],
    originals: Originals,
    current: Originals = lambda path: None,
) -> Plan:
    """Return what ``components`` of the set make of a target of ``release``.

    What a file is at present (``current``) was compiled before it was written, and is
    not compiled again.
    """
    components = tuple(components)
    serving = candidates(patch_set, release, components)
    found = _search(patch_set, serving, originals)
    plan = Plan()
    for identity, hunks in serving.items():
        choice = choose(patch_set, release, identity, hunks, originals, found)
        plan.choices.append(choice)
        if choice.verdict == "unserved":
            plan.unfit[identity] = _unserved(choice, release)
    wanted = [choice for choice in plan.choices if choice.verdict == "wanted"]
    _plan_hunks(plan, wanted, release, originals, found)
    for module in modules_for(patch_set, release, components):
        source = patch_set.source(module)
        if originals(module.path) not in (None, source):
            plan.problems.append(Problem("H306", {"file": module.path}))
        plan.files[module.path] = PlannedFile(module.path, "add", None, source)
    for file in plan.files.values():
        problem = None if current(file.path) == file.desired else _compiles_not(file)
        plan.problems += [problem] if problem else []
    plan.problems = sorted(
        [*_together(plan.unfit, plan.choices), *plan.problems],
        # Foreign lines in the target explain what does not match, so they come first.
        key=lambda problem: not problem.code.startswith("E"),
    )
    return plan


def _together(unfit: dict[str, Problem], choices: list[Choice]) -> list[Problem]:
    """Join all E402: they have one cause and one remedy."""
    lost: dict[str, list[str]] = {}
    for choice in choices:
        problem = unfit.get(choice.identity)
        if problem is not None and problem.code == "E402":
            lost.setdefault(choice.hunk.target, []).append(choice.identity)
    others = [problem for problem in unfit.values() if problem.code != "E402"]
    return [unrecorded(lost), *others] if lost else others


def _search(
    patch_set: PatchSet,
    serving: Mapping[str, tuple[Hunk, ...]],
    originals: Originals,
) -> dict[str, list[Match]]:
    """Search upstream's files for all rules at once, those of drop conditions too.

    A file that is missing or not UTF-8 matches nothing; that is said elsewhere.
    """
    rules: dict[str, list[str]] = {}
    for identity, hunks in serving.items():
        judge = judged(patch_set, identity, hunks)
        for hunk in hunks:
            rules.setdefault(hunk.target, []).append(hunk.as_rule())
        drop = drop_rule(judge)
        if drop is not None:
            rules.setdefault(judge.target, []).append(drop)
    sources = {path: originals(path) for path in rules}
    return astgrep.scan(
        astgrep.Search(path, normalise(source)[0], tuple(rules[path]))
        for path, source in sources.items()
        if source is not None and not _encoding_problem(path, source)
    )


def _plan_hunks(
    plan: Plan,
    wanted: list[Choice],
    release: Version,
    originals: Originals,
    found: Mapping[str, list[Match]],
) -> None:
    by_target: dict[str, list[Choice]] = {}
    for choice in wanted:
        by_target.setdefault(choice.hunk.target, []).append(choice)
    for path, choices in by_target.items():
        source = originals(path)
        problem = _encoding_problem(path, source)
        if problem:
            plan.problems.append(problem)
        elif source is None:
            for choice in choices:
                plan.unfit[choice.identity] = _missing(choice, release)
        else:
            _plan_file(plan, path, source, choices, found[path])


def _plan_file(
    plan: Plan,
    path: str,
    source: bytes,
    choices: list[Choice],
    matches: list[Match],
) -> None:
    plain, carriage_returns = normalise(source)
    edits: list[Edit] = []
    done: list[str] = []
    for choice in choices:
        try:
            edits += edits_of_choice(choice, plain, matches)
            done.append(choice.identity)
        except Refused as refused:
            (plan.unfit[choice.identity],) = refused.problems
    if edits:
        desired = splice(source, edits, carriage_returns)
        kept = tuple(sorted(edits, key=lambda edit: edit.at))
        plan.files[path] = PlannedFile(path, "hunk", source, desired, tuple(done), kept)


def _encoding_problem(path: str, source: bytes | None) -> Problem | None:
    """Return H308 if ``source`` cannot be read as ast-grep reads it."""
    try:
        (source or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        detail = f"byte {byte:#x} at offset {error.start}"
        return Problem("H308", {"file": path, "detail": detail})
    return None


def _unserved(choice: Choice, release: Version) -> Problem:
    kind, argument = choice.hunk.drop_when
    fields = {
        "id": choice.identity,
        "version": release,
        "drop": f"{kind} {argument}",
        "ranges": choice.detail,
    }
    return Problem("H307", fields)


def _missing(choice: Choice, release: Version) -> Problem:
    fields = {"id": choice.identity, "file": choice.hunk.target, "version": release}
    return Problem("H305", fields)


def _compiles_not(file: PlannedFile) -> Problem | None:
    """Return H304 if the result does not compile; H309 if upstream's text did not."""
    error = _compile_error(file.path, file.desired)
    if error is None:
        return None
    before = file.original and _compile_error(file.path, file.original)
    fields = {
        "file": file.path,
        "python": ".".join(map(str, sys.version_info[:2])),
        "line": getattr(before or error, "lineno", None) or 0,
        "detail": getattr(before or error, "msg", None) or str(before or error),
    }
    if before:
        return Problem("H309", fields)
    fields["ids"] = ", ".join(file.hunks) or "(a module of the set)"
    return Problem("H304", fields)


def _compile_error(path: str, source: bytes) -> Exception | None:
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return error
    return None
