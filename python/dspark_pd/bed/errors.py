"""What the bed says when it cannot go on: four parts, and the tail of a log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BedError(RuntimeError):
    """A start, a request or a check of the bed failed.

    Every part is one sentence for a person who did not write this code; ``log_tail``
    holds the last lines of the process that failed, if one did.
    """

    summary: str
    expected: str = ""
    found: str = ""
    cause: str = ""
    next_step: str = ""
    log_tail: str = ""
    usage: bool = False
    """True when what the user asked for is wrong, not what happened afterwards."""

    def __str__(self) -> str:
        parts = [self.summary]
        for label, text in (
            ("expected", self.expected),
            ("found", self.found),
            ("likely cause", self.cause),
            ("next", self.next_step),
        ):
            if text:
                parts.append(f"  {label}: {text}")
        if self.log_tail:
            parts.append("  last lines of its log:")
            parts += [f"    | {line}" for line in self.log_tail.splitlines()]
        return "\n".join(parts)
