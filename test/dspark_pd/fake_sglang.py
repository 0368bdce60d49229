"""A made-up SGLang in miniature and a patch set for it.

The tree has what the tool looks at: a package, a distribution folder with RECORD, and
files whose shape changes between releases. Every line is ours. Releases:

- ``1.0.0`` ``Relay.look_up`` has another shape; ``start`` does not check its settings
- ``1.1.0`` the shape that most hunks are written for
- ``1.2.0`` ``start`` checks its settings itself, so one hunk is not needed any more
"""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path

RELEASES = ("1.0.0", "1.1.0", "1.2.0")
LATEST = RELEASES[-1]

_RELAY_OLD = '''\
"""Keeps rows between two steps."""


class Relay:
    def look_up(self, batch):
        return [self.rows[i] for i in batch.places()]
'''

_RELAY = '''\
"""Keeps rows between two steps."""


class Relay:
    size = 8

    def look_up(self, batch):
        """Return the rows of a batch."""
        places = batch.places()  # where they were stored
        if batch.is_empty():
            return []
        return [self.rows[i] for i in places]

    def store(self, batch, rows):
        places = batch.places()
        for place, row in zip(places, rows):
            self.rows[place] = row


class Spare:
    def look_up(self, batch):
        places = []
        return places
'''

_START = '''\
def start(settings):
    banner = """starting
  with a text over lines"""
    print(banner)
    return settings
'''

_START_CHECKED = """\
def check(settings):
    assert settings


def start(settings):
    check(settings)
    return settings
"""

_DEVICES = """\
KNOWN = ("one", "two")


def accepts(device):
    if device not in KNOWN:
        raise ValueError(device)
    return True
"""


def files_of(release: str) -> dict[str, str]:
    """Return the files below ``sglang`` by path."""
    return {
        "__init__.py": "",
        "_version.py": f"__version__ = version = '{release}'\n",
        "srt/__init__.py": "",
        "srt/managers/__init__.py": "",
        "srt/managers/relay.py": _RELAY_OLD if release == "1.0.0" else _RELAY,
        "srt/start.py": _START if release in RELEASES[:2] else _START_CHECKED,
        "srt/devices.py": _DEVICES,
        "srt/untouched.py": f"RELEASE = '{release}'\n",
    }


def install(site: Path, release: str = LATEST, **changed: str) -> Path:
    """Put a release into ``site`` as an installer would; return its ``sglang``.

    Files of an earlier release that are on its RECORD go first, as in ``pip install
    -U``; files that nobody recorded stay. ``changed`` replaces contents by path.
    """
    uninstall(site)
    rows = []
    for path, text in {**files_of(release), **changed}.items():
        data = text.encode()
        place = site / "sglang" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
        rows.append(f"sglang/{path},sha256={digest.rstrip(b'=').decode()},{len(data)}")
    info = site / f"sglang-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: sglang\nVersion: {release}\n")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return site / "sglang"


def uninstall(site: Path) -> None:
    """Remove what is on the RECORD, and folders that are empty then, as pip does."""
    for folder in site.glob("sglang-*.dist-info"):
        for line in (folder / "RECORD").read_text().splitlines():
            (site / line.partition(",")[0]).unlink(missing_ok=True)
        shutil.rmtree(folder)
    for path in sorted((site / "sglang").rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def snapshot(folder: Path) -> dict[str, object]:
    """Return everything below ``folder``: content, owner, mode, links, empty folders."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        name = path.relative_to(folder).as_posix()
        status = path.lstat()
        look = (status.st_uid, status.st_gid, oct(status.st_mode))
        if path.is_symlink():
            found[name] = (*look, str(path.readlink()), path.read_bytes())
        elif path.is_dir():
            found[name] = look
        else:
            found[name] = (*look, path.read_bytes())
    return found


HUNK = """\
id: {id}
language: python
severity: hint
message: {message}
note: |
  Made up for a test.
url: https://github.com/sgl-project/sglang/issues/1
metadata:
  kind: {kind}
  component: {component}
  releases: "{releases}"
  expect: 1
  forwarded: "no"
  drop_when: {drop_when}
  calls: {calls}
  proved_by: test/dspark_pd/test_apply_revert.py::test_apply_inserts_our_lines
rule:
  pattern: $ANCHOR
  kind: {node}
  inside:
    kind: block
    inside:
      kind: function_definition
      has: {{field: name, regex: ^{function}$}}
{inside}
fix: |-
{fix}
"""

_IN_RELAY = """\
      inside:
        stopBy: {kind: class_definition}
        kind: class_definition
        has: {field: name, regex: ^Relay$}
"""

_GUARD = "sglang.srt.managers.relay_guard"


REVIEW = '{review: "https://github.com/sgl-project/sglang/pull/1"}'


def hunk(**fields: str) -> str:
    """Return a hunk document; ``fields`` replace the parts of a valid one."""
    values = {
        "id": "relay.keep-input",
        "message": "Keep what nobody stored",
        "kind": "fix",
        "component": "native",
        "releases": ">=1.1.0,<1.3.0",
        "drop_when": REVIEW,
        "calls": f"{_GUARD}.nothing_stored",
        "node": "expression_statement",
        "function": "look_up",
        "inside": "",
        "fix": "  $ANCHOR",
        **fields,
    }
    return HUNK.format(**values)


def overlay_files() -> dict[str, str]:
    """Return the files of the patch set by path."""
    guard_lines = (
        f"  $ANCHOR\n  from {_GUARD} import nothing_stored\n\n"
        "  if nothing_stored(self, batch):\n      return []"
    )
    keep = hunk(inside=_IN_RELAY, fix=guard_lines).replace(
        "  kind: expression_statement\n",
        "  kind: expression_statement\n  regex: ^places = batch\n",
    )
    keep_old = hunk(
        id="relay.keep-input@1.0.0",
        releases=">=1.0.0,<1.1.0",
        node="return_statement",
        inside=_IN_RELAY,
        fix=f"  from {_GUARD} import nothing_stored\n\n"
        "  if nothing_stored(self, batch):\n      return []\n  $ANCHOR",
    )
    check = hunk(
        id="start.check-settings",
        message="Check the settings before anything starts",
        component="agreement",
        releases=">=1.0.0,<1.2.0",
        drop_when='{symbol: "srt/start.py::check"}',
        calls="sglang.srt.agreement.rules.check_settings",
        node="return_statement",
        function="start",
        inside="",
        fix="  from sglang.srt.agreement.rules import check_settings\n\n"
        "  check_settings(settings)\n  $ANCHOR",
    )
    device = hunk(
        id="devices.accept-named",
        message="Accept a device that was named",
        component="cpu",
        kind="gate",
        releases=">=1.0.0,<1.3.0",
        calls=f"{_GUARD}.is_named",
        node="if_statement",
        function="accepts",
        inside="",
        fix=f"  from {_GUARD} import is_named\n\n"
        "  if is_named(device):\n      return True\n  $ANCHOR",
    )
    return {
        "components.yml": _COMPONENTS,
        "overlay.yml": _MODULES,
        "releases.yml": "".join(f'- "{release}"\n' for release in RELEASES),
        "srt/managers/relay.py.hunks.yml": f"{keep}---\n{keep_old}",
        "srt/start.py.hunks.yml": check,
        "srt/devices.py.hunks.yml": device,
        "srt/managers/relay_guard.py": (
            "def nothing_stored(relay, batch):\n    return not batch.places()\n\n\n"
            "def is_named(device):\n    return bool(device)\n"
        ),
        "srt/agreement/rules.py": (
            "from sglang.srt.managers.relay_guard import is_named\n\n\n"
            "def check_settings(settings):\n    assert is_named(settings)\n"
        ),
    }


_COMPONENTS = """\
native:
  title: "[PD] Keep what nobody stored"
  motivation: Made up for a test.
robustness:
  title: "[PD] Nothing"
  motivation: Made up for a test.
agreement:
  title: "[PD] Check the settings"
  motivation: Made up for a test.
  needs: [native]
handoff:
  title: "[PD] Nothing either"
  motivation: Made up for a test.
  needs: [agreement]
cpu:
  title: Accept a device that was named
  motivation: Made up for a test.
  needs: [native]
"""
_MODULES = """\
- path: srt/managers/relay_guard.py
  component: native
  releases: ">=1.0.0,<1.3.0"
  what: says whether anything was stored
- path: srt/agreement/rules.py
  component: agreement
  releases: ">=1.0.0,<1.3.0"
  what: what two engines must agree on
"""


def write_overlay(folder: Path, **changed: str) -> Path:
    """Write the patch set into ``folder``; ``changed`` replaces files by path."""
    for path, text in {**overlay_files(), **changed}.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder
