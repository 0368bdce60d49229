"""What apply, revert, status and diff have in common: target, set, survey, plan."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NoReturn

from packaging.version import Version

from dspark_pd.messages.errors import Problem, Refused, about, on_target, refuse
from dspark_pd.messages.result import count
from dspark_pd.patchset.lists import (
    Components,
    by_default,
    in_order,
    with_needs,
)
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set
from dspark_pd.planning.plan import Plan, make_plan
from dspark_pd.target.release import read_release
from dspark_pd.target.survey import Survey
from dspark_pd.target.target import UNINSTALLED, Target, find_target

RESTART: Final = "restart the engines that run from here"
_LIST: Final = "dspark-pd list"
_WAY: Final = (
    "; dspark-pd apply puts the set on again, dspark-pd revert removes what is left"
)


@dataclass(frozen=True)
class Context:
    """One target seen through one patch set."""

    patch_set: PatchSet
    survey: Survey

    @property
    def target(self) -> Target:
        return self.survey.target

    def plan(self, components: Iterable[str]) -> Plan:
        assert self.target.release is not None
        return make_plan(
            self.patch_set,
            self.target.release,
            components,
            self.survey.original,
            self.survey.applied,
        )

    def _idle_component(self, options: Namespace, plan: Plan) -> Problem | None:
        """Return T105 where the user named components that have nothing for this release.

        Without a name, or with ``all``, whatever serves it is what was asked for.
        """
        named = options.component or []
        idle = {} if "all" in named else plan.idle_components()
        found = [
            name for name in in_order(self.patch_set.components, named) if name in idle
        ]
        if not found:
            return None
        fields = {
            "version": self.target.release,
            "components": ", ".join(found),
            "served": ", ".join(f"{name} serves {idle[name]}" for name in found),
        }
        return Problem("T105", fields)

    def problems(self, options: Namespace, plan: Plan) -> list[Problem]:
        """Return what stands in the way, the one that decides the exit code first."""
        assert self.target.release is not None
        edited = self.survey.problems()
        unknown = unknown_release(self.patch_set, self.target.release, plan)
        if unknown:
            return [unknown, *edited]
        idle = self._idle_component(options, plan)
        return [*edited, *plan.problems, *([idle] if idle else [])]

    def asked(self, options: Namespace) -> tuple[tuple[str, ...], Plan]:
        """Return what the target shall end up with and its plan, or refuse."""
        refuse_any(self.survey.problems())
        applied = self.survey.ledger.components
        components = asked_components(options, self.patch_set.components, applied)
        plan = self.plan(components)
        refuse_any(self.problems(options, plan))
        return components, plan

    def notes(
        self, options: Namespace, plan: Plan, components: Iterable[str]
    ) -> list[str]:
        """Return what a user should hear about the target besides the result."""
        survey, release = self.survey, self.target.release
        found = need_notes(options, self.patch_set.components, components)
        if happened := what_happened(survey):
            repairs = options.verb == "apply" and not options.dry_run
            known = self.patch_set.knows(release) if release else False
            way = "" if repairs or not known else on_target(_WAY, options.target)
            found.append(happened + way)
        if survey.ledger.unfinished:
            found.append(_cut_off(survey.ledger.unfinished, options))
        found += [
            f"component {component} has nothing for SGLang {release}: it serves later ones"
            for component in plan.idle_components()
        ]
        if any(problem.code == "E402" for problem in plan.problems):
            return found  # The lines that upstream did not ship are ours.
        hunked = [path for path, file in plan.files.items() if file.kind == "hunk"]
        for path in survey.foreign_originals(hunked):
            found.append(
                f"{path} was edited before apply; the edit is kept, under our lines"
            )
        return found


def what_happened(survey: Survey) -> str | None:
    """Say what changed under the applied set, other than by an edit."""
    old, new = survey.ledger.release, survey.target.release
    if survey.target.source == UNINSTALLED:
        return f"SGLang {old} was uninstalled under the applied set"
    if survey.updated:
        return _other_release(survey, f"{old}", f"{new}")
    back, gone = survey.restored("original"), survey.restored("missing")
    if survey.ledger.unfinished or not back + gone:
        return None
    files = f"{count(back, 'changed file')} as released" if back else ""
    lost = f"{count(gone, 'changed file')} gone" if gone else ""
    found = " and ".join(filter(None, (files, lost)))
    return f"SGLang {new} was installed again or restored over the applied set: {found}"


def _other_release(survey: Survey, old: str, new: str) -> str:
    """Say what went from one release to another: SGLang, or what it was taken for."""
    if survey.ledger.assumed_over is None and survey.target.assumed_over is None:
        return f"SGLang went from {old} to {new} under the applied set"
    return f"the set was applied for SGLang {old}, and the target is taken for {new}"


def _cut_off(verb: str, options: Namespace) -> str:
    """Say what became of an earlier run, or what would finish it."""
    if options.verb == "apply" and not options.dry_run:
        return f"an earlier {verb} was cut off; repaired"
    other = "revert" if verb == "apply" else "apply"
    way = f"dspark-pd {verb} finishes it, dspark-pd {other} takes it back"
    return on_target(f"an earlier {verb} was cut off: {way}", options.target)


def unknown_release(
    patch_set: PatchSet, release: Version, plan: Plan
) -> Problem | None:
    """Return T103 with how much of the set fits, if the release is not known."""
    if patch_set.knows(release):
        return None
    tried = [c for c in plan.choices if c.verdict in ("wanted", "unserved")]
    newest = patch_set.releases[-1]
    renew = "git pull && pip install . (in the clone of sglang-dspark-pd)"
    fields = {
        "version": release,
        "releases": ", ".join(map(str, patch_set.releases)),
        "fit": _fit(len(tried), list(plan.unfit)),
        "hint": f"{renew}, or repeat with --assume-version {newest}",
    }
    return Problem("T103", fields)


def _fit(total: int, unfit: list[str]) -> str:
    if not unfit:
        return "the one hunk fits" if total == 1 else f"all {total} hunks fit"
    fitting = total - len(unfit)
    return f"{fitting} of {total} hunks fit; not: {', '.join(unfit)}"


def open_context(options: Namespace) -> Context:
    """Return the context that ``options`` name; refuse if there is none."""
    assumed = getattr(options, "assume_version", None)
    target = find_target(options.target, assumed)
    with about(target):
        if target.release is None:
            refuse("T102", target=target.root)
        patch_set = load_patch_set(options.overlay)
        refuse_assumption(patch_set, target, assumed)
        return Context(patch_set, Survey(target))


def refuse_assumption(patch_set: PatchSet, target: Target, assumed: str | None) -> None:
    """Refuse with U007 to take one known release for another: no hunk would fit."""
    if assumed is None:
        return
    found, source = read_release(target.root)
    if found is None or not patch_set.knows(found):
        return
    if found.public != Version(assumed).public:
        with about(Target(target.root, found, source)):
            refuse("U007", target=target.root, found=found, assumed=assumed)


def need_clone(patch_set: PatchSet, what: str) -> None:
    """Refuse with T104 outside a clone: a wheel has only what apply needs."""
    if not (patch_set.repository / "test" / "registered").is_dir():
        refuse(
            "T104",
            what=what,
            needed="a clone of sglang-dspark-pd, for its tests and docs",
            found=f"{patch_set.overlay}, without test/registered beside it",
            cause="dspark-pd was installed from a wheel",
            hint="clone the repository, and run pip install -e . in the clone",
        )


def named_components(options: Namespace, components: Components) -> tuple[str, ...]:
    """Return the components that the user named; none means no choice was made.

    Refuses with U002 a name that is no component.
    """
    named = options.component or []
    for name in named:
        if name != "all" and not in_order(components, [name]):
            known = f"all, or one of {', '.join(components)}"
            refuse("U002", what="component", name=name, known=known, hint=_LIST)
    return in_order(components, components if "all" in named else named)


def asked_components(
    options: Namespace, components: Components, applied: Iterable[str]
) -> tuple[str, ...]:
    """Return the components that apply shall end up with, and all that they need.

    Named ones are added to those applied already, so that ``apply --component cpu``
    never takes another one off; that is ``revert --component``'s.
    """
    named = named_components(options, components) or by_default(components)
    return with_needs(components, {*named, *applied})


def need_notes(
    options: Namespace, components: Components, asked: Iterable[str]
) -> list[str]:
    """Say which components come along only because a named one needs them."""
    named = named_components(options, components)
    notes = []
    for name in named:
        needed = set(with_needs(components, [name])) - {*named}
        along = [other for other in asked if other in needed]
        if along:
            notes.append(f"{name} needs {' and '.join(along)}, which come along")
    return notes


def refuse_name(
    what: str, name: str, names: Iterable[str], hint: str = _LIST
) -> NoReturn:
    """Refuse with U002 a name that is none, and say which ones are like it."""
    names = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, names, 3, 0)
    known = f"a name such as {', '.join(near)} ({len(names)} in all)"
    refuse("U002", what=what, name=name, known=known, hint=hint)


def refuse_any(problems: list[Problem]) -> None:
    if problems:
        raise Refused(problems)
