"""Checks of the set against its own repository (``list --check``).

They need more than the overlay: tests, and all modules together. A user's install has
neither changed nor needs them; a developer runs them before every commit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from dspark_pd.messages.errors import Problem
from dspark_pd.patchset.fields import MAX_INSERTED_LINES
from dspark_pd.patchset.hunk import Hunk
from dspark_pd.patchset.lists import MODULES_FILE, Module, with_needs
from dspark_pd.patchset.patch_set import PatchSet, contradiction
from dspark_pd.patchset.python_source import defines, imported, module_name
from dspark_pd.patchset.series import problems_of


def check(patch_set: PatchSet) -> list[Problem]:
    """Return everything in which the set contradicts its repository."""
    repository = patch_set.repository
    return [
        *_module_problems(patch_set),
        *_reach_problems(patch_set),
        *_need_problems(patch_set),
        *problems_of(patch_set),
        *(p for hunk in patch_set.hunks for p in _call_problems(patch_set, hunk)),
        *(p for hunk in patch_set.hunks for p in _proof_problems(hunk, repository)),
        *(p for hunk in patch_set.hunks for p in _record_problems(hunk)),
    ]


def _module_problems(patch_set: PatchSet) -> Iterator[Problem]:
    """Every module on the list is on the disk, once, and the other way round."""
    listed = [module.path for module in patch_set.modules]
    present = {
        path.relative_to(patch_set.overlay).as_posix()
        for path in patch_set.overlay.rglob("*.py")
    }
    for path in sorted(set(listed)):
        if listed.count(path) > 1:
            yield contradiction(path, f"one entry in {MODULES_FILE}", "two")
        if path not in present:
            yield contradiction(path, "the module in the overlay", "no file")
    for path in sorted(present - set(listed)):
        yield contradiction(path, f"an entry in {MODULES_FILE}", "none")


def _users(patch_set: PatchSet) -> Iterator[tuple[str, Module | Hunk, list[Module]]]:
    """Yield each module and hunk with the modules of ours that it imports."""
    by_name = {module_name(module.path): module for module in patch_set.modules}
    for module in patch_set.modules:
        if (patch_set.overlay / module.path).is_file():
            yield module.path, module, imported(patch_set.source(module), by_name)
    for hunk in patch_set.hunks:
        text = hunk.data["fix"]
        found = [m for name, m in by_name.items() if f"{name} import" in text]
        yield hunk.id, hunk, found


def _reach_problems(patch_set: PatchSet) -> Iterator[Problem]:
    """Every module is called by a hunk, imported by another one or registered."""
    reached = {module.path for module in patch_set.modules if module.reached_by}
    for _, user, used in _users(patch_set):
        reached |= {module.path for module in used if module is not user}
    for module in patch_set.modules:
        if module.path not in reached:
            wanted = "a hunk that calls it, a module that imports it, or reached_by"
            yield contradiction(module.path, wanted, "an orphan")


def _need_problems(patch_set: PatchSet) -> Iterator[Problem]:
    """What a module or hunk imports is in its component or in one that it needs, and
    serves every release that it serves."""
    for name, user, used in _users(patch_set):
        allowed = with_needs(patch_set.components, [user.component])
        for module in used:
            if module.component not in allowed:
                wanted = f"{module.component} in the needs of {user.component}"
                yield contradiction(f"{name} imports {module.path}", wanted, allowed)
            for release in patch_set.releases:
                if user.serves(release) and not module.serves(release):
                    wanted = f"a range of {module.path} with {release}"
                    yield contradiction(name, wanted, module.releases)
                    break


def _call_problems(patch_set: PatchSet, hunk: Hunk) -> Iterator[Problem]:
    """``calls`` names a function of an overlay module, and the fix uses it."""
    dotted = hunk.metadata.get("calls")
    if dotted is None:
        return
    module, _, function = str(dotted).rpartition(".")
    path = patch_set.overlay / (
        module.removeprefix("sglang.").replace(".", "/") + ".py"
    )
    what = f"calls of {hunk.id}"
    if not path.is_file() or not defines(path.read_bytes(), function):
        yield contradiction(what, "a function of an overlay module", dotted)
    if not any(use in hunk.data["fix"] for use in (f"{function}(", f"@{function}\n")):
        yield contradiction(what, f"a call of {function} in fix", "none")


def _proof_problems(hunk: Hunk, repository: Path) -> Iterator[Problem]:
    """``proved_by`` names a test that exists."""
    test_id = str(hunk.metadata["proved_by"])
    file, _, name = test_id.partition("::")
    path = repository / file
    if not path.is_file() or not _has_test(path.read_bytes(), name.split("::")):
        yield contradiction(f"proved_by of {hunk.id}", "a test that exists", test_id)


def _has_test(source: bytes, names: list[str]) -> bool:
    """Whether the file defines the test, in the class or in a base of the same file."""
    if defines(source, ".".join(names)):
        return True
    if len(names) != 2 or not defines(source, names[0]):
        return False
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return any(_has_test(source, [base, names[1]]) for base in bases)
    return False


def _record_problems(hunk: Hunk) -> Iterator[Problem]:
    """The upstream trail is reasoned, and the hunk is small."""
    if hunk.url is None and hunk.metadata["forwarded"] == "no":
        wanted = 'a url, or forwarded "not-needed: reason"'
        yield contradiction(f"the upstream trail of {hunk.id}", wanted, "neither")
    lines = hunk.data["fix"].strip().splitlines()
    added = [line for line in lines if line.strip() and "$" not in line]
    if len(added) > MAX_INSERTED_LINES:
        wanted = f"at most {MAX_INSERTED_LINES} inserted lines"
        yield contradiction(f"the fix of {hunk.id}", wanted, len(added))
