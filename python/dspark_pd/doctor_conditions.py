"""When the doctor's own rows apply: questions to one engine, or to a pair.

A question about something that could not be read raises ``Unread``.
"""

from __future__ import annotations

from collections.abc import Callable

from dspark_pd.doctor_fields import HICACHE_FOLDER, LAYER_IDS, ON
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


def drafts(engine: Engine) -> bool:
    return bool(engine.arg("speculative_algorithm") == "DSPARK")


def role_is(engine: Engine, role: str) -> bool:
    return engine.arg("disaggregation_mode") in (role, None)


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
