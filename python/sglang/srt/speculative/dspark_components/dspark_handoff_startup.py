"""Start-up of the tail handoff: what is refused, and what each engine gets.

1. ``validate_server_args`` runs once in the launching process, before any weight is
   loaded. Everything refused here would otherwise start, answer health checks and
   either draft from wrong context or fail at the first request.
2. ``fill_capture_config`` tells the target's model runner which layers to capture.
3. ``attach_tail_buffer`` runs in every scheduler when its metadata buffers exist.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    TailSpec,
    describe_role,
    load_draft_config,
    resolve_decode_spec,
    resolve_prefill_spec,
)
from sglang.srt.speculative.dspark_components.dspark_handoff_knobs import (
    HandoffConfigError,
    capture_enabled,
    cold_draft_allowed,
    expect_peer_draft_tokens,
    partial_context_allowed,
    refuse_idle_knobs,
    tail_expected,
)
from sglang.srt.speculative.dspark_components.pp_aux_capture import graph_refusal

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Backends whose metadata send is shaped to the rows that exist.
TAIL_BACKENDS = ("nixl", "mooncake", "fake")


def validate_server_args(server_args: Any) -> None:
    """Check the handoff's knobs against the resolved server arguments.

    Does nothing unless a knob of the handoff is set.

    Raises:
        HandoffConfigError: a combination that cannot work; the message names the
            flag or variable and what to do instead.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    cfg = resolved_view(server_args)
    partial_context_allowed()  # A value that is neither on nor off stops here.
    if capture_enabled():
        _check_capture_role(cfg)
        _refuse_all(_prefill_refusals(cfg), "capture of prefill rows")
        spec = resolve_prefill_spec(cfg, model_config_of(server_args))
        expect_peer_draft_tokens(model_config_of(server_args).hf_config)
        _log_spec("prefill captures", spec)
        return
    refuse_idle_knobs(cfg.disaggregation_mode)
    if not _is_dspark(cfg) or cfg.disaggregation_mode != "decode":
        return
    _refuse_cold_shared_draft(cfg)
    if not tail_expected():
        return
    _refuse_all(_decode_refusals(cfg), "a tail from prefill")
    draft = load_draft_config(cfg, cfg.speculative_draft_model_path)
    spec = resolve_decode_spec(
        draft,
        model_config_of(server_args),
        source=str(cfg.speculative_draft_model_path),
    )
    if spec.window_need is None or spec.tail_tokens < spec.window_need:
        if cfg.disaggregation_decode_enable_radix_cache:
            raise HandoffConfigError(
                "--disaggregation-decode-enable-radix-cache shares draft KV between "
                "requests, and with only part of the context it would differ with who "
                "came before. Drop the flag, or let the tail cover the draft's window."
            )
        logger.warning(
            "Draft context is partial: %d rows of what the draft attends to (%s). "
            "Output stays exact; fewer drafts are accepted.",
            spec.tail_tokens,
            "the whole prompt" if spec.window_need is None else spec.window_need,
        )
    _log_spec("decode expects", spec)


def _refuse_cold_shared_draft(cfg: Any) -> None:
    if cfg.disaggregation_decode_enable_radix_cache and cold_draft_allowed():
        raise HandoffConfigError(
            "--disaggregation-decode-enable-radix-cache shares draft KV between "
            "requests, and a draft without context (SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT) "
            "would differ with who came before. Drop one of the two."
        )


def _is_dspark(cfg: Any) -> bool:
    return (cfg.speculative_algorithm or "").upper() == "DSPARK"


def _check_capture_role(cfg: Any) -> None:
    name = envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.name
    if cfg.disaggregation_mode != "prefill":
        found = cfg.disaggregation_mode
        role = "a server of its own" if found == "null" else f"a {found} engine"
        raise HandoffConfigError(
            f"{name}=1 on {role} (--disaggregation-mode {found}): only prefill has "
            "rows to hand over. Unset it here and set it on the prefill engine; a "
            "decode engine is told to expect rows by "
            f"{envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name}."
        )
    if cfg.speculative_algorithm is not None:
        raise HandoffConfigError(
            f"{name}=1 together with --speculative-algorithm "
            f"{cfg.speculative_algorithm}: this prefill already has a draft, and its "
            "draft KV travels by itself. Drop one of the two."
        )


def _prefill_refusals(cfg: Any) -> Iterator[tuple[bool, str]]:
    yield _backend_refusal(cfg)
    yield (
        getattr(cfg, "enable_return_aux_hidden_states", False),
        "--enable-return-aux-hidden-states captures other layers in the same forward",
    )
    yield (
        getattr(cfg, "enable_return_hidden_states", False)
        or getattr(cfg, "return_hidden_states_mode", None) is not None,
        "returning hidden states would answer with captured rows (drop "
        "--return-hidden-states-mode and --enable-return-hidden-states)",
    )
    yield (
        getattr(cfg, "attn_cp_size", 1) > 1,
        "--attn-cp-size > 1 shards the rows of one position range over ranks",
    )
    yield (
        getattr(cfg, "enable_kv_cache_sharding", False),
        "--enable-kv-cache-sharding is not supported with a draft on decode",
    )
    yield (
        getattr(cfg, "enable_two_batch_overlap", False),
        "--enable-two-batch-overlap runs two captures in one forward",
    )
    yield (
        getattr(cfg, "enable_streaming_session", False),
        "--enable-streaming-session continues a request behind KV of its last turn, "
        "and cached tokens produce no rows",
    )
    yield (
        getattr(cfg, "enable_pdmux", False),
        "--enable-pdmux splits a prefill by layers and skips the capture",
    )
    yield _role_switch_refusal(cfg)
    graphs = cfg.pp_size > 1 and graph_refusal(cfg.cuda_graph_config.prefill.backend)
    yield bool(graphs), graphs or ""


def _decode_refusals(cfg: Any) -> Iterator[tuple[bool, str]]:
    yield _backend_refusal(cfg)
    yield _role_switch_refusal(cfg)
    yield (
        getattr(cfg, "dcp_size", 1) > 1,
        "--dcp-size > 1 splits one request's draft KV over ranks",
    )
    yield (
        getattr(cfg, "enable_hisparse", False),
        "--enable-hisparse builds its own draft input",
    )
    yield (
        getattr(cfg, "enable_unified_memory", False),
        "--enable-unified-memory addresses draft KV by physical ids",
    )
    yield (
        getattr(cfg, "enable_hierarchical_cache", False),
        "--enable-hierarchical-cache on decode restores prefixes without draft KV",
    )
    yield (
        getattr(cfg, "disaggregation_decode_host_receive_threshold", 1) < 1,
        "--disaggregation-decode-host-receive-threshold stages requests on the host",
    )


def _backend_refusal(cfg: Any) -> tuple[bool, str]:
    from sglang.srt.disaggregation.mooncake.utils import (
        check_mooncake_custom_mem_pool_enabled,
    )

    backend = cfg.disaggregation_transfer_backend
    _, memory_pool = check_mooncake_custom_mem_pool_enabled()
    if memory_pool == "INTRA_NODE_NVLINK":
        return True, (
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK keeps metadata in device "
            "memory, and slots with rows need host memory (unset it)"
        )
    if backend == "mooncake" and (
        envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get() or memory_pool == "NVLINK"
    ):
        return True, (
            "Mooncake sends metadata over TCP here, whole slots at a time (unset "
            "SGLANG_MOONCAKE_SEND_AUX_TCP, and SGLANG_MOONCAKE_CUSTOM_MEM_POOL where it "
            "means NVLINK)"
        )
    return (
        backend not in TAIL_BACKENDS,
        f"--disaggregation-transfer-backend {backend} is not supported; use one of "
        f"{', '.join(TAIL_BACKENDS[:2])}",
    )


def _role_switch_refusal(cfg: Any) -> tuple[bool, str]:
    return (
        getattr(cfg, "enable_pd_role_switch", False),
        "--enable-pd-role-switch changes the role that decides who captures",
    )


def _refuse_all(refusals: Iterator[tuple[bool, str]], feature: str) -> None:
    reasons = [reason for refused, reason in refusals if refused]
    if reasons:
        raise HandoffConfigError(
            f"{feature} cannot be combined with: " + "; ".join(reasons) + "."
        )


def _log_spec(what: str, spec: TailSpec) -> None:
    logger.info(
        "DSpark handoff: %s the last %d rows of each prompt, target layers %s, %d "
        "bytes a row.",
        what,
        spec.tail_tokens,
        list(spec.layer_ids),
        spec.row_bytes,
    )


def fill_capture_config(
    config: Any,
    *,
    server_args: ServerArgs,
    model_config: ModelConfig,
    is_draft_worker: bool,
) -> None:
    """Name the layers a capturing prefill's target must snapshot, in place."""
    from sglang.srt.arg_groups.overrides import resolved_view

    if is_draft_worker or not capture_enabled():
        return
    spec = resolve_prefill_spec(resolved_view(server_args), model_config)
    config.dflash_use_aux_hidden_state = True
    config.dflash_target_layer_ids = list(spec.layer_ids)
    config.is_dspark = True
    expect_peer_draft_tokens(model_config.hf_config)


def attach_tail_buffer(
    scheduler: Scheduler, buffers: MetadataBuffers, size: int
) -> None:
    """Give an engine of the handoff its tail buffer; all others stay as they are.

    Args:
        size: number of metadata slots.

    Raises:
        HandoffConfigError: the buffer does not fit, or the draft reads other layers
            than the target was told to capture.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.disaggregation.agreement.engine_facts import describers
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail

    if describe_role not in describers:
        describers.append(describe_role)
    cfg = resolved_view(scheduler.server_args)
    if capture_enabled():
        spec = resolve_prefill_spec(cfg, scheduler.model_config)
        # Earlier stages cap prefix matches like the last one but own no rows.
        tail = (
            _build_tail(spec, buffers, size)
            if get_parallel().pp_group.is_last_rank
            else None
        )
        dspark_handoff_tail.activate(tail, cap_tokens=spec.tail_tokens)
        buffers.dspark_tail = tail
        return
    if not scheduler.spec_algorithm.is_dspark() or cfg.disaggregation_mode != "decode":
        return
    _attach_decode(scheduler, cfg, buffers, size)


def _attach_decode(
    scheduler: Scheduler, cfg: Any, buffers: MetadataBuffers, size: int
) -> None:
    from sglang.srt.speculative.dspark_components import (
        dspark_handoff_decode,
        dspark_handoff_tail,
    )
    from sglang.srt.speculative.dspark_components.dspark_handoff import draft_facts

    worker = scheduler.draft_worker
    draft_config = worker.draft_model_runner.model_config.hf_config
    facts = draft_facts(draft_config, scheduler.model_config)
    dspark_handoff_decode.adopt_draft(
        worker.primary_draft_kv_pool,
        facts.window_need,
        shares_slots=cfg.disaggregation_decode_enable_radix_cache,
        plain_slots=not any(refused for refused, _ in _decode_refusals(cfg)),
    )
    if not tail_expected():
        return
    spec = resolve_decode_spec(draft_config, scheduler.model_config)
    captured = worker.model_runner.spec_aux_config.dflash_target_layer_ids
    if tuple(sorted(captured)) != spec.layer_ids:
        raise HandoffConfigError(
            f"The draft's config names target layers {spec.layer_ids}, but this target "
            f"maps them to {tuple(captured)}. A tail from prefill is not supported for "
            "this pair; run DSPARK on prefill as well."
        )
    pool = worker.primary_draft_kv_pool
    covered = spec.window_need is not None and spec.tail_tokens >= spec.window_need
    masked = hasattr(pool, "set_swa_valid_from")
    if not (covered or masked or dspark_handoff_decode.is_clearable(pool)):
        raise HandoffConfigError(
            f"Draft KV pool {type(pool).__name__} keeps no row per token slot, so what a "
            "partial tail leaves open cannot be cleared. Let the tail cover the draft's "
            "window, or run DSPARK on prefill as well."
        )
    tail = _build_tail(spec, buffers, size)
    dspark_handoff_tail.activate(tail)
    buffers.dspark_tail = tail


def _build_tail(spec: TailSpec, buffers: MetadataBuffers, size: int) -> Any:
    import psutil

    from sglang.srt.speculative.dspark_components.dspark_handoff_tail import TailBuffer

    wanted = size * spec.item_bytes
    available = psutil.virtual_memory().available
    if wanted > available // 2:
        raise HandoffConfigError(
            f"A tail of {spec.tail_tokens} rows needs {size} slots of "
            f"{spec.item_bytes} bytes, {wanted >> 20} MiB in all; {available >> 20} "
            "MiB are free. Lower "
            f"{envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name} or "
            "--max-running-requests."
        )
    logger.info(
        "DSpark handoff: %d metadata slots of %d bytes, %.1f MiB of host memory.",
        size,
        spec.item_bytes,
        wanted / (1 << 20),
    )
    return TailBuffer(spec, size, device=buffers.bootstrap_room.device)
