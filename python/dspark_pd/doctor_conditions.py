"""When the doctor's own rows apply: questions to one engine, or to a pair.

A question about something that could not be read raises ``Unread``. What engines with
variables of a tail refuse at start is asked of files alone: a running engine, whose
environment nobody knows, was not refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark_pd.doctor_fields import (
    ALLOW_COLD_DRAFT,
    AUX_TCP,
    HICACHE_FOLDER,
    LAYER_IDS,
    MEMORY_POOL,
    ON,
    TAIL_TOKENS,
)
from dspark_pd.doctor_inputs import Engine
from dspark_pd.doctor_releases import released, serves

# Target architectures whose pipeline stages hand captured rows on.
STAGED_CAPTURE = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
    "DeepseekV4ForCausalLM",
    "KimiLinearForCausalLM",
    "KimiK3ForConditionalGeneration",
)
TAIL_BACKENDS = ("nixl", "mooncake", "fake")
MAX_TAIL_TOKENS = 4096


@dataclass(frozen=True)
class Check:
    """One row; `applies` gets (prefill, decode)."""

    code: str
    severity: str
    applies: Callable[[Engine, Engine], Any]
    message: str
    consequence: str
    fix: str


def drafts(engine: Engine) -> bool:
    return bool(engine.arg("speculative_algorithm") == "DSPARK")


def wrong_role(engine: Engine) -> bool:
    """Whether an engine is known to run in another role, or in none.

    A file that can be read says it all; a server may leave out what it likes.
    """
    name = "disaggregation_mode"
    mode = engine.args.get(name)
    told = mode is not None or not engine.source.startswith(("http://", "https://"))
    return told and name not in engine.unread and mode != engine.role


def runs_as(engine: Engine) -> str:
    """The engine's role as its source has it."""
    name = "disaggregation_mode"
    if name in engine.unread:
        return "a --disaggregation-mode that is not known"
    mode = engine.args.get(name)
    return f"--disaggregation-mode {mode}" if mode else "no --disaggregation-mode"


def is_on(engine: Engine, switch: str) -> bool:
    """Whether a variable is set to on; False where the environment is not known."""
    return engine.env(switch).strip().lower() in ON


def differ(name: str) -> Callable[[Engine, Engine], bool]:
    def check(prefill: Engine, decode: Engine) -> bool:
        values = (prefill.arg(name), decode.arg(name))
        return bool(values[0] != values[1])

    return check


def both_known_and_differ(name: str) -> Callable[[Engine, Engine], bool]:
    differs = differ(name)
    return lambda p, d: None not in (p.arg(name), d.arg(name)) and differs(p, d)


def stages(engine: Engine) -> int:
    return int(engine.arg("pp_size") or 1)


def architecture(engine: Engine) -> str | None:
    names = (engine.target_config or {}).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def checksum_on_one(prefill: Engine, decode: Engine) -> bool:
    name = "disaggregation_enable_kv_checksum"
    return prefill.has(name) != decode.has(name)


def lacks_layer_ids(prefill: Engine, _: Engine) -> bool:
    config = prefill.target_config or {}
    return (
        prefill.mode == "tail"
        # A running one has found them.
        and prefill.environ is not None
        and not prefill.env(LAYER_IDS)
        and bool(config)
        and config.get("dspark_target_layer_ids") is None
        and not prefill.has("speculative_draft_model_path")
    )


def stages_cannot_capture(prefill: Engine, _: Engine) -> bool:
    name = architecture(prefill)
    drafts = prefill.mode in ("native", "tail")
    return stages(prefill) > 1 and drafts and name not in (None, *STAGED_CAPTURE)


def no_handoff_for(engine: Engine) -> bool:
    release = released(engine.release)
    return release is not None and not serves("handoff", release)


def file_backend_without_folder(prefill: Engine, _: Engine) -> bool:
    return (
        prefill.arg("hicache_storage_backend") == "file"
        and prefill.environ is not None
        and not prefill.env(HICACHE_FOLDER)
    )


# -- the tail ---------------------------------------------------------------------------


def captures(prefill: Engine) -> bool:
    """Whether a file starts a prefill that captures a tail."""
    return prefill.environ is not None and prefill.mode == "tail"


def expects_tail(decode: Engine) -> bool:
    """Whether a file starts a decode that was told to expect a tail."""
    return decode.environ is not None and decode.mode == "tail"


@dataclass(frozen=True)
class AnyOf:
    """Whether the engine of ``role`` has part in a tail and any of the flags."""

    role: str
    names: tuple[str, ...]

    def __call__(self, prefill: Engine, decode: Engine) -> bool:
        if self.role == "prefill":
            concerned, engine = captures(prefill), prefill
        else:
            concerned, engine = expects_tail(decode), decode
        return concerned and any(engine.has(name) for name in self.names)


def on_tail_engines(
    check: Callable[[Engine], bool],
) -> Callable[[Engine, Engine], bool]:
    """Ask each of the engines that has part in a tail."""
    return lambda p, d: (captures(p) and check(p)) or (expects_tail(d) and check(d))


def host_receives(decode: Engine) -> bool:
    share = decode.arg("disaggregation_decode_host_receive_threshold")
    return share is not None and float(share) < 1


def staged_graphs(prefill: Engine) -> bool:
    backend = prefill.arg("cuda_graph_backend_prefill")
    return stages(prefill) > 1 and backend not in (None, "disabled")


def other_backend(engine: Engine) -> bool:
    backend = engine.arg("disaggregation_transfer_backend")
    return backend not in (None, *TAIL_BACKENDS)


def sends_aux_over_tcp(engine: Engine) -> bool:
    pool = engine.env(MEMORY_POOL)
    if pool == "INTRA_NODE_NVLINK":
        return True
    # Mooncake is what an engine without the flag takes.
    if engine.arg("disaggregation_transfer_backend") not in (None, "mooncake"):
        return False
    return is_on(engine, AUX_TCP) or pool == "NVLINK" or pool.lower() == "true"


def tail_out_of_range(engine: Engine) -> bool:
    given = engine.env(TAIL_TOKENS).strip()
    return bool(given) and not (int(given) == -1 or 0 < int(given) <= MAX_TAIL_TOKENS)


def shares_partial_context(prefill: Engine, decode: Engine) -> bool:
    """Whether decode shares draft KV that a tail fills only in part."""
    if not decode.has("disaggregation_decode_enable_radix_cache"):
        return False
    tail = decode.description.get("dspark")
    if decode.mode != "tail" or not tail or "window_need" not in tail:
        return False
    need, rows = tail["window_need"], tail.get("tail_tokens")
    # Without a number of rows, the tail is as long as the window needs.
    return need is None or (rows is not None and rows < need)


def handoff_is_cold(decode: Engine) -> bool:
    return (
        drafts(decode)
        and not no_handoff_for(decode)
        and is_on(decode, ALLOW_COLD_DRAFT)
    )
