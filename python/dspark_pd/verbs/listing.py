"""``list``: the hunks of the set, one of them in full, or all errors as a preview."""

from __future__ import annotations

from argparse import Namespace

from packaging.version import Version

from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import Problem, catalogue
from dspark_pd.messages.result import Result, count
from dspark_pd.patchset.fields import DECIDABLE
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import Module
from dspark_pd.patchset.patch_set import PatchSet, load_patch_set
from dspark_pd.verbs.context import named_components, need_clone, refuse_name


def run(options: Namespace) -> Result:
    if options.errors:
        return _errors()
    if options.check:
        return _check(options)
    patch_set = load_patch_set(options.overlay)
    file = (options.id or "").removeprefix("python/").removeprefix("sglang/")
    files = {*(h.target for h in patch_set.hunks), *(m.path for m in patch_set.modules)}
    if file in files:
        return _all(patch_set, named_components(options, patch_set.components), file)
    if options.id:
        return _one(patch_set, options.id)
    return _all(patch_set, named_components(options, patch_set.components))


def _all(
    patch_set: PatchSet, components: tuple[str, ...], file: str | None = None
) -> Result:
    hunks = [
        variants[0]
        for variants in patch_set.identities.values()
        if (not components or variants[0].component in components)
        and file in (None, variants[0].target)
    ]
    modules = [
        module
        for module in patch_set.modules
        if (not components or module.component in components)
        and file in (None, module.path)
    ]
    lines = _table(patch_set, hunks)
    if file is not None:
        lines += [f"{m.component:<10} {m.path}  {m.what}" for m in modules]
    files = len({hunk.target for hunk in hunks})
    decidable = sum(hunk.drop_when[0] in DECIDABLE for hunk in hunks)
    lines += [
        f"drop conditions that a program decides: {decidable} of {len(hunks)}",
        f"{count(len(hunks), 'hunk')} on {count(files, 'file')}, "
        f"{count(len(modules), 'module')}, "
        f"SGLang {_span(_served(patch_set, hunks, modules))}",
    ]
    data = {
        "hunks": [hunk_data(patch_set, hunk) for hunk in hunks],
        "modules": [
            {
                "path": module.path,
                "component": module.component,
                "releases": str(module.releases),
                "what": module.what,
            }
            for module in modules
        ],
        "releases": [str(release) for release in patch_set.releases],
        "decidable": decidable,
    }
    return Result(lines=lines, data=data)


def _table(patch_set: PatchSet, hunks: list[Hunk]) -> list[str]:
    width = max((len(hunk.identity) for hunk in hunks), default=0)
    lines = []
    for hunk in hunks:
        span = _span(_served(patch_set, [hunk], []))
        head = f"{hunk.component:<10} {hunk.identity:<{width}}"
        lines.append(f"{head}  {span:<16} {hunk.target}  {hunk.message}")
    return lines


def _served(
    patch_set: PatchSet, hunks: list[Hunk], modules: list[Module]
) -> list[Version]:
    """Return the releases that any of them serves."""
    variants = [v for hunk in hunks for v in patch_set.identities[hunk.identity]]
    return [
        release
        for release in patch_set.releases
        if any(hunk.serves(release) for hunk in variants)
        or any(module.serves(release) for module in modules)
    ]


def _span(served: list[Version]) -> str:
    return f"{served[0]} to {served[-1]}" if len(served) > 1 else str(served[0])


def _one(patch_set: PatchSet, name: str) -> Result:
    variants = patch_set.identities.get(name.partition("@")[0])
    if variants is None:
        refuse_name("hunk", name, patch_set.identities)
    lines = [line for hunk in variants for line in describe(hunk)]
    return Result(lines=lines, data=hunk_data(patch_set, variants[0]))


def describe(hunk: Hunk) -> list[str]:
    """Return the record of one hunk for a person."""
    kind, argument = hunk.drop_when
    fields = {
        "what": hunk.message,
        "why": hunk.note.replace("\n", "\n           "),
        "file": hunk.target,
        "component": f"{hunk.component} ({hunk.metadata['kind']})",
        "releases": str(hunk.releases),
        "calls": str(hunk.metadata.get("calls", "nothing of ours")),
        "upstream": hunk.url or hunk.metadata["forwarded"],
        "drop when": f"{kind}: {argument}",
        "proved by": hunk.metadata["proved_by"],
        "written in": hunk.place,
    }
    return [hunk.id, *(f"  {label:<10} {text}" for label, text in fields.items())]


def hunk_data(patch_set: PatchSet, hunk: Hunk) -> dict[str, object]:
    """Return what programs get to know of an identity, its variants included."""
    kind, argument = hunk.drop_when
    variants = patch_set.identities[hunk.identity]
    return {
        "id": hunk.identity,
        "message": hunk.message,
        "note": hunk.note,
        "url": hunk.url,
        "file": hunk.target,
        "kind": hunk.metadata["kind"],
        "component": hunk.component,
        "forwarded": hunk.metadata["forwarded"],
        "drop_when": {kind: argument},
        "calls": hunk.metadata.get("calls"),
        "proved_by": hunk.metadata["proved_by"],
        "variants": {variant.id: str(variant.releases) for variant in variants},
    }


def _errors() -> Result:
    problems = [Problem(kind.code, kind.example) for kind in catalogue().values()]
    lines = [line for p in problems for line in [*p.as_text().splitlines(), ""]]
    data = {"errors": [{**p.as_dict(), "exit_code": p.exit_code} for p in problems]}
    return Result(lines=lines[:-1], data=data)


def _check(options: Namespace) -> Result:
    from dspark_pd.patchset import hygiene

    patch_set = load_patch_set(options.overlay)
    need_clone(patch_set, "list --check")
    problems = hygiene.check(patch_set)
    result = Result(problems=problems, data={"checked": len(patch_set.hunks)})
    if problems:
        result.exit_code = exit_codes.MISMATCH
    else:
        hunks = count(len(patch_set.hunks), "hunk document")
        modules = count(len(patch_set.modules), "module")
        result.lines = [f"set is consistent: {hunks}, {modules}"]
    return result
