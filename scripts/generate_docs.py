#!/usr/bin/env python3
"""Write the parts of the docs that code knows better: hunks, options, codes.

    scripts/generate_docs.py            rewrite what is stale
    scripts/generate_docs.py --check    exit 1 and name what is stale, write nothing

A generated part stands between two comments in a page; the prose around it is written by
hand and kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import agreement_tables  # noqa: E402
import bench_tail  # noqa: E402

from dspark_pd.cli import build_parser  # noqa: E402
from dspark_pd.messages import exit_codes, output  # noqa: E402
from dspark_pd.messages.errors import PARTS, catalogue  # noqa: E402
from dspark_pd.messages.result import Result  # noqa: E402
from dspark_pd.patchset.fields import DECIDABLE  # noqa: E402
from dspark_pd.patchset.hunk import Hunk  # noqa: E402
from dspark_pd.patchset.patch_set import load_patch_set  # noqa: E402

DOCS = ROOT / "docs_new" / "docs"
COMMENTS = {".mdx": ("{/* ", " */}"), ".md": ("<!-- ", " -->")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for page, names in PAGES.items():
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        fresh = text
        for name in names:
            comment = COMMENTS[path.suffix]
            fresh = replace_part(fresh, name, PARTS_BY_NAME[name](), comment)
        if fresh != text:
            stale.append(path.resolve().relative_to(ROOT))
            if not check:
                path.write_text(fresh, encoding="utf-8")
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}")
    return 1 if stale and check else 0


def replace_part(text: str, name: str, body: str, comment: tuple[str, str]) -> str:
    begin = f"generated: {name}".join(comment)
    end = "end of generated part".join(comment)
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise SystemExit(f"no place for the generated part {name!r}")
    return f"{head}{begin}\n\n{body.strip()}\n\n{end}{tail}"


def table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(value: object) -> str:
    """Keep a table cell on its line; a bar would end it."""
    return " ".join(str(value).split()).replace("|", "\\|")


def prose(text: str) -> str:
    """Escape what MDX would read as a tag or an expression."""
    return re.sub(r"([{}<])", r"\\\1", text)


def code(text: object) -> str:
    return f"`{text}`"


def set_size() -> str:
    """What `apply` changes on the newest release, as it says itself.

    The goldens hold every line that is inserted.
    """
    patch_set = load_patch_set()
    newest = Version(str(patch_set.releases[-1]))
    modules = [m for m in patch_set.modules if m.serves(newest)]
    lines = sum(
        len((patch_set.overlay / m.path).read_bytes().splitlines()) for m in modules
    )
    hunks = [h for h in patch_set.hunks if h.serves(newest) and h.component != "cpu"]
    golden = ROOT / "test" / "dspark_pd" / "golden" / str(newest)
    rendered = "".join(path.read_text() for path in sorted(golden.rglob("*.txt")))
    inserted = sum(_inserted(rendered, hunk.identity) for hunk in hunks)
    files = len({hunk.target for hunk in hunks})
    decided = sum(hunk.drop_when[0] in DECIDABLE for hunk in hunks)
    return (
        f"{newest}: {len(modules)} new modules ({lines:,} lines) and {len(hunks)} hunks "
        f"(about {round(inserted, -1)} lines) in {files} of SGLang's files; nothing is deleted.\n\n"
        "When it goes: each hunk names the condition that makes it unnecessary. For "
        f"{decided} of them `dspark-pd status` finds out and says *not needed*; for the "
        f"other {len(hunks) - decided} it names the public thread to look at."
    )


def _inserted(rendered: str, identity: str) -> int:
    """Lines of one hunk in a golden text, at all its places."""
    counts = re.findall(
        rf"^{re.escape(identity)} .*\n((?: {{4}}\|.*\n)*)", rendered, re.M
    )
    return sum(block.count("\n") for block in counts)


def hunk_counts() -> str:
    patch_set = load_patch_set()
    oldest, newest = patch_set.releases[0], patch_set.releases[-1]
    rows = []
    for component in patch_set.components:
        hunks = [v[0] for v in patch_set.identities.values()]
        hunks = [hunk for hunk in hunks if hunk.component == component]
        modules = [m for m in patch_set.modules if m.component == component]
        files = {hunk.target for hunk in hunks}
        rows.append((code(component), len(modules), len(hunks), len(files)))
    rows.append(
        ("all", *(sum(int(str(row[i])) for row in rows) for i in (1, 2)), all_files())
    )
    header = ("component", "new modules", "hunks", "upstream files")
    return f"SGLang {oldest} to {newest}.\n\n{table(header, rows)}"


def all_files() -> int:
    return len({hunk.target for hunk in load_patch_set().hunks})


def hunk_register() -> str:
    patch_set = load_patch_set()
    parts = [decidable_count()]
    for component in patch_set.components:
        groups = [
            variants
            for variants in patch_set.identities.values()
            if variants[0].component == component
        ]
        if groups:
            title = patch_set.components[component].title.removeprefix("[PD] ")
            parts.append(f"## {component}: {title[0].lower()}{title[1:]}")
            parts.append(drop_table(groups))
            parts += [describe(variants) for variants in groups]
    return "\n\n".join(parts)


def decidable_count() -> str:
    """Say how many drop conditions ``status`` and ``bump_release.sh`` decide."""
    hunks = [variants[0] for variants in load_patch_set().identities.values()]
    count = sum(hunk.drop_when[0] in DECIDABLE for hunk in hunks)
    return (
        f"A program decides {count} of {len(hunks)} drop conditions; the others name an "
        "upstream review, which `scripts/bump_release.sh X.Y.Z try` prints."
    )


def drop_table(groups: list[tuple[Hunk, ...]]) -> str:
    rows = []
    for variants in groups:
        kind, argument = variants[0].drop_when
        reason = prose(f"{kind}: {argument}")
        rows.append((link_to(variants[0]), releases_of(variants), reason))
    return table(("hunk", "releases", "drop when"), rows)


def file_table() -> str:
    """Return one row per upstream file and component: what the set does to it."""
    groups: dict[tuple[str, str], list[tuple[Hunk, ...]]] = {}
    for variants in load_patch_set().identities.values():
        key = variants[0].target, variants[0].component
        groups.setdefault(key, []).append(variants)
    rows: list[tuple[object, ...]] = []
    for (target, component), hunks in sorted(groups.items()):
        links = ", ".join(link_to(variants[0]) for variants in hunks)
        ranges = dict.fromkeys(
            code(variant.releases) for variants in hunks for variant in variants
        )
        rows.append((code(target), links, code(component), ", ".join(sorted(ranges))))
    return table(("file", "hunks", "component", "releases"), rows)


def link_to(hunk: Hunk) -> str:
    return f"[`{hunk.identity}`](#{anchor_of(hunk)})"


def anchor_of(hunk: Hunk) -> str:
    """Return the id that the docs give to a heading of this text."""
    return hunk.identity.replace(".", "").lower()


def releases_of(variants: tuple[Hunk, ...]) -> str:
    return ", ".join(code(variant.releases) for variant in variants)


def describe(variants: tuple[Hunk, ...]) -> str:
    hunk = variants[0]
    kind, argument = hunk.drop_when
    facts = [
        ("file", code(hunk.target)),
        ("kind", hunk.metadata["kind"]),
        ("releases", releases_of(variants)),
        ("calls", code(hunk.metadata.get("calls", "nothing of ours"))),
        ("upstream", hunk.url or prose(str(hunk.metadata["forwarded"]))),
        ("drop when", f"{kind}: {code(argument)}"),
        ("proved by", code(hunk.metadata["proved_by"])),
    ]
    lines = [f"### {hunk.identity}", "", f"**{prose(hunk.message)}.**", ""]
    lines += [prose(" ".join(hunk.note.split())), ""]
    lines += [f"- {name}: {value}" for name, value in facts]
    return "\n".join(lines)


def module_table() -> str:
    patch_set = load_patch_set()
    rows: list[tuple[object, ...]] = [
        (code(m.path), code(m.component), code(m.releases), prose(m.what))
        for m in patch_set.modules
    ]
    return table(("module", "component", "releases", "what for"), rows)


def exit_code_table() -> str:
    rows: list[tuple[object, ...]] = [*exit_codes.MEANINGS.items()]
    return table(("exit code", "meaning"), rows)


def error_table() -> str:
    rows: list[tuple[object, ...]] = []
    for kind in catalogue().values():
        texts = {part: getattr(kind, part).format(**kind.example) for part in PARTS}
        texts = {part: prose(text) for part, text in texts.items()}
        row = (kind.code, kind.exit_code, *(texts[part] for part in PARTS))
        rows.append(row)
    return table(("code", "exit", *PARTS), rows)


def option_reference() -> str:
    """Return the help of each verb, at a width that does not depend on the terminal.

    ``demo`` has a parser of its own, which starts engines.
    """
    parts = [
        f"### {verb}\n\n```\n{help_text(parsers_of(verb)[verb])}\n```"
        for verb in parsers_of(None)
        if verb != "demo"
    ]
    return "\n\n".join(parts)


def parsers_of(asked: str | None) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb; a large one has its options only if it is asked for."""
    (verbs,) = (
        action.choices
        for action in build_parser(asked)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(verbs)


def help_text(parser: argparse.ArgumentParser) -> str:
    kind = parser.formatter_class
    parser.formatter_class = lambda prog: kind(prog, width=88)
    return parser.format_help().strip()


def envelope_table() -> str:
    meanings = {
        "schema": f"version of this shape, {output.SCHEMA}; a new number if a key goes",
        "tool": "name and version of the tool",
        "command": "the verb; null if it was not known",
        "status": "ok, differs or error",
        "exit_code": "the same as the process ends with",
        "target": "path, release and where the release was read; null without a target",
        "data": "the answer of the verb",
        "notes": "sentences for a person",
        "errors": "code, title, expected, found, cause and next of each error",
    }
    keys = output.envelope("status", Result()).keys()
    rows: list[tuple[object, ...]] = [(code(key), meanings[key]) for key in keys]
    return table(("key", "meaning"), rows)


def tail_measurements() -> str:
    """The numbers behind the plot beside them."""
    measured = json.loads((ROOT / "docs_new/images/dspark_pd_tail.json").read_text())
    return bench_tail.table([bench_tail.Point(**p) for p in measured["points"]])


PARTS_BY_NAME: dict[str, Callable[[], str]] = {
    "size of the set": set_size,
    "counts": hunk_counts,
    "files": file_table,
    "register": hunk_register,
    "modules": module_table,
    "exit codes": exit_code_table,
    "errors": error_table,
    "options": option_reference,
    "envelope": envelope_table,
    "agreement": lambda: agreement_tables.agreement_rules(table, prose),
    "runtime codes": lambda: agreement_tables.runtime_codes(table, prose),
    "tail measurements": tail_measurements,
    "doctor checks": lambda: agreement_tables.doctor_checks(table, prose),
}
PAGES = {
    "../../README.md": ("size of the set",),
    "advanced_features/dspark_pd_agreement.mdx": (
        "agreement",
        "runtime codes",
        "doctor checks",
    ),
    "advanced_features/dspark_pd_pp.mdx": ("tail measurements",),
    "advanced_features/dspark_pd_hunks.mdx": ("counts", "files", "register", "modules"),
    "developer_guide/dspark_pd_tool.mdx": (
        "options",
        "exit codes",
        "envelope",
        "errors",
    ),
}

if __name__ == "__main__":
    sys.exit(main())
