"""What a demo run found: the JSON for programs, the table and the verdict for people.

Accept length is completion tokens per target verify pass, the number SGLang reports
as `spec_accept_length`; 1 means that nothing was accepted, gamma + 1 is the most.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_pd.bed.client import Reply
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.modes import NO_SPEC, Mode
from dspark_pd.bed.specs import Backend
from dspark_pd.measure.statistics import Figure, by_step

SCHEMA = 1
TITLES: dict[Backend, str] = {"nixl": "NIXL", "mooncake": "Mooncake"}
MIN_ACCEPT_WITH_CONTEXT = 3.5
MAX_ACCEPT_WITHOUT_CONTEXT = 1.6
# Estimates: no GPU has run this.
MIN_ACCEPT_ON_CUDA = 3.0
MIN_RATIO_ON_CUDA, MAX_RATIO_ON_CUDA = 0.9, 1.1
_RATIO_DIGITS = 6


def write_report(path: Path, data: dict[str, Any]) -> None:
    """Write what was found; BedError when the file does not take it."""
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise BedError(
            f"--json {path} was not written; what is printed above is all there is",
            expected="a file that this user can write, on a disk with room",
            found=str(error),
            next_step="run again with another file",
        ) from error


@dataclass(frozen=True)
class Run:
    """All requests of one mode; `bytes_moved` is counted at the transfer itself."""

    mode: Mode
    replies: tuple[Reply, ...]
    bytes_moved: int
    seconds: float

    @property
    def verify_steps(self) -> tuple[int, ...]:
        return tuple(reply.verify_steps for reply in self.replies)

    @property
    def tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    @property
    def accept_length(self) -> float | None:
        """Over all requests together; None without speculation."""
        steps = sum(self.verify_steps)
        return self.tokens / steps if steps else None

    @property
    def target_steps_per_token(self) -> float:
        """Decode passes of the target per token; 1 without speculation."""
        return sum(self.verify_steps) / self.tokens if any(self.verify_steps) else 1.0

    @property
    def with_steps(self) -> frozenset[int]:
        """Requests whose verify steps are known; merged events hide those of a reply."""
        known = enumerate(self.replies)
        return frozenset(i for i, reply in known if reply.verify_steps and reply.steps)

    def same_output(self, other: Run) -> bool:
        """Every request gave the same tokens."""
        mine = [reply.output_ids for reply in self.replies]
        return mine == [reply.output_ids for reply in other.replies]


@dataclass(frozen=True)
class Claim:
    """One thing the demo is there to show, and whether it held."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Report:
    """Everything one demo run found."""

    sglang: str
    gamma: int
    runs: tuple[Run, ...]
    device: str = "cpu"
    """On ``cuda``, in bfloat16, batches round differently: texts are reported and not
    required, accept lengths have a band, and nobody counts bytes."""
    transfer_backend: Backend = "nixl"

    def run(self, key: str) -> Run | None:
        """The run of a mode, None when it was not asked for."""
        return next((run for run in self.runs if run.mode.key == key), None)

    def reference(self, run: Run) -> Run:
        """The run that `run` is compared with; it always runs along."""
        found = self.run(run.mode.reference)
        if found is None:
            raise LookupError(f"{run.mode.key} is compared with {run.mode.reference}")
        return found

    def as_json(self) -> dict[str, Any]:
        """The report in schema version 1."""
        return {
            "schema": SCHEMA,
            "sglang": self.sglang,
            "device": self.device,
            "transfer_backend": self.transfer_backend,
            "gamma": self.gamma,
            "runs": [_run_json(run, self.by_step(run)) for run in self.runs],
            "parity": {
                run.mode.key: self._parity(run)
                for run in self.runs
                if run.mode.key not in (run.mode.reference, NO_SPEC)
            },
        }

    def _parity(self, run: Run) -> dict[str, Any]:
        reference = self.reference(run)
        ratio = (run.accept_length or 0.0) / (reference.accept_length or 1.0)
        return {
            "identical_outputs": run.same_output(reference),
            "accept_length_ratio": round(ratio, _RATIO_DIGITS),
        }

    def claims(self) -> list[Claim]:
        """What must hold of the modes that ran."""
        found: list[Claim] = []
        for run in self.runs:
            found += self._claims_of(run)
        return found

    def _claims_of(self, run: Run) -> list[Claim]:
        key, reference = run.mode.key, self.reference(run)
        claims = []
        if self.device == "cuda":
            return self._claims_in_a_band(run)
        if key != run.mode.reference:
            text = f"{key}: every output equals {reference.mode.key}, token by token"
            claims.append(Claim(text, run.same_output(reference)))
        if run.mode.name == NO_SPEC:
            return claims
        accept = run.accept_length or 0.0
        if not run.mode.exact:
            text = f"{key}: accept length {accept:.2f} <= {MAX_ACCEPT_WITHOUT_CONTEXT}"
            claims.append(Claim(text, 0 < accept <= MAX_ACCEPT_WITHOUT_CONTEXT))
        elif key == run.mode.reference:
            text = f"{key}: accept length {accept:.2f} >= {MIN_ACCEPT_WITH_CONTEXT}"
            claims.append(Claim(text, accept >= MIN_ACCEPT_WITH_CONTEXT))
        else:
            text = f"{key}: verify steps of every request equal {reference.mode.key}"
            claims.append(Claim(text, run.verify_steps == reference.verify_steps))
        if len(run.mode.engines) > 1:
            backend = TITLES[self.transfer_backend]
            text = f"{key}: {backend} moved {run.bytes_moved:,} bytes"
            claims.append(Claim(text, run.bytes_moved > 0))
        return claims

    def _claims_in_a_band(self, run: Run) -> list[Claim]:
        """A band where rounding decides; a draft without context is far outside it."""
        key, reference = run.mode.key, self.reference(run)
        if run.mode.name == NO_SPEC:
            return []
        accept = run.accept_length or 0.0
        if not run.mode.exact:
            text = f"{key}: accept length {accept:.2f} <= {MAX_ACCEPT_WITHOUT_CONTEXT}"
            return [Claim(text, 0 < accept <= MAX_ACCEPT_WITHOUT_CONTEXT)]
        if key == run.mode.reference:
            text = f"{key}: accept length {accept:.2f} >= {MIN_ACCEPT_ON_CUDA}"
            return [Claim(text, accept >= MIN_ACCEPT_ON_CUDA)]
        ratio = accept / (reference.accept_length or 1.0)
        text = f"{key}: accept length {ratio:.2f} of {reference.mode.key}, 0.9 to 1.1"
        return [Claim(text, MIN_RATIO_ON_CUDA <= ratio <= MAX_RATIO_ON_CUDA)]

    def table(self) -> str:
        """One line per run, aligned, with a header."""
        return _aligned([_HEADER, *(self._row(run) for run in self.runs)], _LEFT)

    def by_step(self, run: Run) -> dict[str, Figure]:
        """Accept length of each verify step after prefill; {} without speculation.

        Of the same requests in every run with the same reference: requests differ more
        than runs do.
        """
        shared = self._shared(run)
        return by_step([run.replies[i].steps or () for i in sorted(shared)])

    def _shared(self, run: Run) -> frozenset[int]:
        """Requests whose steps are known in every run compared with that of `run`."""
        peers = [r for r in self.runs if r.mode.reference == run.mode.reference]
        known = [peer.with_steps for peer in peers if any(peer.verify_steps)]
        return run.with_steps.intersection(*known)

    def step_table(self) -> str:
        """Accept length by verify step of the runs that speculate; "" without any."""
        rows, left_out = [], {}
        for run in self.runs:
            if not any(run.verify_steps):
                continue
            figures = self.by_step(run)
            rows.append(
                (run.mode.key, *(_shown(figures.get(str(n))) for n in _STEPS_SHOWN))
            )
            missing = len(run.replies) - len(self._shared(run))
            if missing:
                reference = self.reference(run).mode.key
                left_out[reference] = (
                    f"{missing} of {len(run.replies)} requests are left out of every row "
                    f"compared with {reference}:\nin one of them their events arrived "
                    "merged, which hides their steps."
                )
        head = ("accept length at step", *map(str, _STEPS_SHOWN))
        table = _aligned([head, *rows], {0}) if rows else ""
        return "\n".join([table, *left_out.values()])

    def _row(self, run: Run) -> tuple[str, ...]:
        reference = self.reference(run)
        same = "yes" if run.same_output(reference) else "NO"
        accept = run.accept_length
        return (
            run.mode.key,
            f"{run.mode.pp}/{run.mode.tp}",
            str(run.tokens),
            str(sum(run.verify_steps)) if accept else "-",
            f"{accept:.2f}" if accept else "-",
            f"{run.target_steps_per_token:.2f}",
            "reference" if run is reference else same,
            "-" if self.device == "cuda" else f"{run.bytes_moved:,}",
            run.mode.title,
        )


_HEADER = (
    "mode",
    "PP/TP",
    "tokens",
    "verify steps",
    "accept length",
    "steps/token",
    "same output",
    "bytes moved",
    "what it is",
)
_LEFT = {0, 8}
_STEPS_SHOWN = range(1, 9)


def _aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_cells(row, widths, left)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _shown(figure: Figure | None) -> str:
    return f"{figure.accept_length:.2f}" if figure and figure.accept_length else "-"


def _cells(
    row: Sequence[str], widths: Sequence[int], left: Container[int]
) -> list[str]:
    return [
        text.ljust(width) if i in left else text.rjust(width)
        for i, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _run_json(run: Run, steps: dict[str, Figure]) -> dict[str, Any]:
    mode = run.mode
    tail = {} if mode.tail_tokens is None else {"tail_tokens": mode.tail_tokens}
    return {
        "mode": mode.name,
        "pp": mode.pp,
        "tp": mode.tp,
        "overlap": mode.overlap,
        **tail,
        "requests": [_request_json(i, reply) for i, reply in enumerate(run.replies)],
        "accept_length": run.accept_length,
        "accept_length_by_step": {
            step: figure.accept_length for step, figure in steps.items()
        },
        "target_steps_per_token": run.target_steps_per_token,
        "bytes_moved": run.bytes_moved,
    }


def _request_json(index: int, reply: Reply) -> dict[str, Any]:
    return {
        "id": f"prompt-{index}",
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "output_sha256": reply.sha256,
        "verify_steps": reply.verify_steps,
        "accept_length": reply.accept_length,
    }
