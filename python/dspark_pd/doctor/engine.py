"""One engine as the doctor knows it, and what is found about it.

Life cycle: ``sources`` makes an ``Engine`` and fills it once; checks only read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
SEVERITIES: Final = (ERROR, WARNING, NOTE)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know about a pair of engines; in a table, with fields to fill in."""

    code: str
    severity: str
    message: str
    consequence: str
    fix: str

    def filled(self, **fields: object) -> Finding:
        """Return the finding that this row of a table is, as in ``str.format``."""
        texts = (self.message, self.consequence, self.fix)
        return Finding(self.code, self.severity, *(t.format(**fields) for t in texts))

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Engine:
    """What is known of one engine.

    ``args`` are server arguments by field name. ``environ`` is None where it cannot be
    known: a running server does not tell. ``description`` is what the engine tells its
    peer or, without that, what follows from its arguments; a missing key is not known.
    ``unpatched`` says that the engine tells its peer nothing. ``problems`` are findings
    from reading it.
    """

    role: str
    source: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    environ: dict[str, str] | None = None
    release: str | None = None
    running: bool = False
    unpatched: bool = False
    target_config: dict[str, Any] | None = None
    draft_config: dict[str, Any] | None = None
    description: dict[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def shown(self) -> str:
        """One line: where it came from and what it is."""
        algorithm = self.args.get("speculative_algorithm") or "no speculation"
        tp, pp = (self.args.get(name) or 1 for name in ("tp_size", "pp_size"))
        release = f", SGLang {self.release}" if self.release else ""
        return f"{self.source} ({algorithm}, TP {tp} PP {pp}{release})"

    @property
    def mode(self) -> str:
        """How draft context is handed over: native, tail or none."""
        return str(self.description.get("mode", "none"))

    @property
    def broken(self) -> bool:
        """Whether it would not start, so that there is nothing to compare."""
        return any(finding.severity == ERROR for finding in self.problems)

    @property
    def drafts(self) -> bool:
        return bool(self.args.get("speculative_algorithm") == "DSPARK")

    def has(self, name: str) -> bool:
        """True when a flag is given and not off."""
        return self.args.get(name) not in (None, False, "", 0)

    def size(self, name: str) -> int:
        """A parallel size; 1 when not given."""
        return int(self.args.get(name) or 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "release": self.release,
            "description": self.description,
        }
