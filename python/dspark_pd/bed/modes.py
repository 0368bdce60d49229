"""What the demo runs, as data: engines, the modes that use them, and the order.

A `Wave` is a set of engines that run at the same time; two waves never do, which keeps
memory low. To show another mode, add its engines to `ENGINES` and a `Mode` to a wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dspark_pd.bed.specs import Backend, Device, EngineSpec

UNIFIED, NO_SPEC = "unified", "no-spec"


@dataclass(frozen=True)
class Pair:
    """The checkpoints one demo run serves."""

    target: Path
    draft: Path
    sliding_draft: Path


@dataclass(frozen=True)
class Mode:
    """One line of the table. `engines` names one unified engine, or prefill and decode.

    `key` is the name in the `parity` part of the report and unique; `name` is the
    `mode` of the run and may repeat with another `pp`. `exact` modes must reproduce
    the accept length of unified serving. `sliding` modes run the all-sliding draft, on
    prompts whose keys fit in its window; `tail_tokens` hidden states are handed over, and -1
    stands for as many as that window needs.
    """

    key: str
    name: str
    title: str
    engines: tuple[str, ...]
    exact: bool = True
    reference: str = UNIFIED
    pp: int = 1
    tp: int = 1
    overlap: bool = True
    sliding: bool = False
    tail_tokens: int | None = None


@dataclass(frozen=True)
class Wave:
    """Modes whose engines are started side by side."""

    modes: tuple[Mode, ...]

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of all engines, each once, in order of first use."""
        return tuple(
            dict.fromkeys(name for mode in self.modes for name in mode.engines)
        )


def _no_spec(pair: Pair) -> EngineSpec:
    return EngineSpec("no-spec", "unified", pair.target)


def _unified(pair: Pair) -> EngineSpec:
    return EngineSpec("unified", "unified", pair.target, pair.draft)


def _prefill(pair: Pair) -> EngineSpec:
    return EngineSpec("prefill", "prefill", pair.target, pair.draft)


def _pipelined_prefill(pair: Pair) -> EngineSpec:
    return EngineSpec("prefill-pp2", "prefill", pair.target, pair.draft, pp=2)


def _cold_prefill(pair: Pair) -> EngineSpec:
    return EngineSpec("cold-prefill", "prefill", pair.target)


def _decode(pair: Pair) -> EngineSpec:
    # It also serves the mode without context, which is refused unless opted into.
    env = {"SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT": "1"}
    return EngineSpec("decode", "decode", pair.target, pair.draft, env=env)


def _tail_prefill(name: str, pair: Pair, pp: int) -> EngineSpec:
    # The draft's config names layers and window; no weights of it are loaded.
    args = {"speculative-draft-model-path": str(pair.sliding_draft)}
    env = {"SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE": "1"}
    return EngineSpec(name, "prefill", pair.target, pp=pp, args=args, env=env)


def _tail_decode(pair: Pair) -> EngineSpec:
    return EngineSpec("tail-decode", "decode", pair.target, pair.sliding_draft)


ENGINES: Mapping[str, Callable[[Pair], EngineSpec]] = {
    "no-spec": _no_spec,
    "unified": _unified,
    "prefill": _prefill,
    "prefill-pp2": _pipelined_prefill,
    "cold-prefill": _cold_prefill,
    "decode": _decode,
    "unified-sliding": lambda pair: EngineSpec(
        "unified-sliding", "unified", pair.target, pair.sliding_draft
    ),
    "tail-prefill": lambda pair: _tail_prefill("tail-prefill", pair, 1),
    "tail-prefill-pp2": lambda pair: _tail_prefill("tail-prefill-pp2", pair, 2),
    "tail-decode": _tail_decode,
}


def _tail_mode(pp: int, prefill: str) -> Mode:
    return Mode(
        f"pd-tail-pp{pp}",
        "pd-tail",
        f"prefill without a draft, {pp} stage{'s' if pp > 1 else ''} + decode, hidden states move",
        (prefill, "tail-decode"),
        reference="unified-sliding",
        pp=pp,
        sliding=True,
        tail_tokens=-1,
    )


WAVES: tuple[Wave, ...] = (
    Wave(
        (
            Mode("no-spec", NO_SPEC, "one server, no speculation", ("no-spec",)),
            Mode("unified", UNIFIED, "one server, DSPARK", ("unified",)),
        )
    ),
    Wave(
        (
            Mode(
                "pd-native",
                "pd-native",
                "prefill + decode, draft KV moves along",
                ("prefill", "decode"),
            ),
            Mode(
                "pd-native-pp2",
                "pd-native",
                "prefill of 2 stages + decode, draft KV moves along",
                ("prefill-pp2", "decode"),
                pp=2,
            ),
            Mode(
                "pd-no-context",
                "pd-no-context",
                "prefill + decode, draft starts cold",
                ("cold-prefill", "decode"),
                exact=False,
            ),
        )
    ),
    Wave(
        (
            Mode(
                "unified-sliding",
                "unified-sliding",
                "one server, DSPARK with the sliding-window draft",
                ("unified-sliding",),
                reference="unified-sliding",
                sliding=True,
            ),
            _tail_mode(1, "tail-prefill"),
            _tail_mode(2, "tail-prefill-pp2"),
        )
    ),
)


def specs(
    wave: Wave, pair: Pair, device: Device, backend: Backend = "nixl"
) -> list[EngineSpec]:
    """The engines of a wave, in its order."""
    return [
        replace(ENGINES[name](pair), device=device, transfer_backend=backend)
        for name in wave.engines
    ]


def on_device(waves: list[Wave], device: Device) -> list[Wave]:
    """Waves without the modes that one GPU cannot run: a stage needs a GPU of its own."""
    if device == "cpu":
        return waves
    kept = [
        replace(wave, modes=tuple(mode for mode in wave.modes if mode.pp == 1))
        for wave in waves
    ]
    return [wave for wave in kept if wave.modes]


def choose(keys: list[str] | None, waves: tuple[Wave, ...] = WAVES) -> list[Wave]:
    """Waves with only the asked modes and those that they are compared with.

    Raises KeyError with the first name that is no mode.
    """
    if not keys:
        return list(waves)
    known = {mode.key: mode for wave in waves for mode in wave.modes}
    wanted = {*keys, *(known[key].reference for key in keys)}
    kept = [
        replace(wave, modes=tuple(m for m in wave.modes if m.key in wanted))
        for wave in waves
    ]
    return [wave for wave in kept if wave.modes]
