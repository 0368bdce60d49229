"""Start-up of the tail handoff: checks, layers to capture, the tail buffer.

1. ``validate_server_args`` runs once in the launching process, before any weight is
   loaded, and applies ``handoff_refusals``. Without it such an engine would start,
   answer health checks and then draft from wrong context or fail at the first request.
2. ``fill_capture_config`` tells the target's model runner which layers to capture.
3. ``with_tail`` runs in every scheduler when its metadata buffers exist.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.speculative.dspark_components import dspark_handoff
from sglang.srt.speculative.dspark_components import handoff_refusals as rules
from sglang.srt.speculative.dspark_components.dspark_handoff import (
    HandoffConfigError,
    TailSpec,
    capture_enabled,
    facts_of,
    refuse,
    resolve_spec,
    spec_of,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        SpecAuxHiddenStateConfig,
    )
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dspark_components.dspark_handoff_tail import TailBuffer

logger = logging.getLogger(__name__)


def validate_server_args(server_args: ServerArgs) -> None:
    """Check the handoff's variables against the resolved server arguments.

    The models' configs are read only where an engine takes part in a handoff.

    Raises:
        HandoffConfigError: a combination that cannot work; the message names the
            flag or variable and what to do instead.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    cfg = resolved_view(server_args)
    facts = facts_of(cfg)
    takes_part = rules.captures(facts) or rules.expects_tail(facts)
    if takes_part or rules.captures_on_stages(facts):
        target = model_config_of(server_args)
        facts = facts_of(cfg, target)
    if not takes_part:
        refuse(facts)
        return
    spec = spec_of(facts, target.dtype)
    if rules.expects_tail(facts) and not spec.covers_draft:
        logger.warning(
            "Draft context is partial: %d tokens of what the draft attends to (%s). "
            "Output stays exact; fewer drafts are accepted.",
            spec.tail_tokens,
            "the whole prompt" if spec.window_need is None else spec.window_need,
        )
    logger.info(
        "DSpark handoff: %s hidden states of the last %d tokens of each prompt, target "
        "layers %s, %d bytes a token.",
        "prefill captures" if rules.captures(facts) else "decode expects",
        spec.tail_tokens,
        list(spec.layer_ids),
        spec.token_bytes,
    )


def fill_capture_config(
    config: SpecAuxHiddenStateConfig,
    *,
    server_args: ServerArgs,
    model_config: ModelConfig,
    is_draft_worker: bool,
) -> None:
    """Name the layers a capturing prefill's target must capture, in place."""
    from sglang.srt.arg_groups.overrides import resolved_view

    if is_draft_worker or not capture_enabled():
        return
    facts = facts_of(resolved_view(server_args), model_config)
    config.dflash_use_aux_hidden_state = True
    config.dflash_target_layer_ids = list(spec_of(facts, model_config.dtype).layer_ids)
    config.is_dspark = True
    if rules.is_deepseek_v4(facts):
        # Its compressor rings are wider when it speculates, and the rings travel: a
        # prefill without a draft must allocate those of its decode.
        dspark_handoff.activate(peer_draft_tokens=rules.peer_draft_tokens(facts))


def with_tail(
    scheduler: Scheduler, buffers: MetadataBuffers, size: int
) -> MetadataBuffers:
    """The metadata buffers of a scheduler, with a tail where the engine has one.

    Args:
        size: number of metadata slots.

    Returns:
        ``buffers`` itself for an engine without a tail.

    Raises:
        HandoffConfigError: the buffer does not fit, or the draft reads other layers
            than the target was told to capture.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.disaggregation.agreement.engine_facts import describers
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail

    if dspark_handoff.describe_role not in describers:
        describers.append(dspark_handoff.describe_role)
    cfg = resolved_view(scheduler.server_args)
    # A switch of roles changes the scheduler's, and leaves the arguments alone.
    role = scheduler.disaggregation_mode.value
    if role == "prefill":
        dspark_handoff_tail.read_registrations()
    if capture_enabled():
        return _with_captured_tail(scheduler, cfg, buffers, size)
    if scheduler.spec_algorithm.is_dspark() and role == "decode":
        return _with_expected_tail(scheduler, cfg, buffers, size)
    return buffers


def _with_captured_tail(
    scheduler: Scheduler, cfg: ServerArgs, buffers: MetadataBuffers, size: int
) -> MetadataBuffers:
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails

    spec = resolve_spec(cfg, scheduler.model_config)
    # Earlier stages cap prefix matches like the last one but own no hidden states.
    last = get_parallel().pp_group.is_last_rank
    tail = _build_tail(spec, buffers, size) if last else None
    dspark_handoff.activate(tail=tail, cap_tokens=spec.tail_tokens)
    return tails.TailMetadataBuffers.of(buffers, tail) if tail else buffers


def _with_expected_tail(
    scheduler: Scheduler, cfg: ServerArgs, buffers: MetadataBuffers, size: int
) -> MetadataBuffers:
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
    from sglang.srt.speculative.dspark_components.dspark_handoff_decode import Draft

    worker = scheduler.draft_worker
    pool = worker.primary_draft_kv_pool
    draft_config = worker.draft_model_runner.model_config.hf_config
    target = scheduler.model_config
    draft = Draft.of(
        pool,
        dspark_handoff.draft_facts(draft_config, target).window_need,
        shares_slots=cfg.disaggregation_decode_enable_radix_cache,
        plain_slots=rules.has_plain_slots(facts_of(cfg)),
    )
    dspark_handoff.activate(draft=draft)
    if not dspark_handoff.tail_expected():
        return buffers
    spec = resolve_spec(cfg, target, draft_config)
    captured = worker.model_runner.spec_aux_config.dflash_target_layer_ids
    if tuple(sorted(captured)) != spec.layer_ids:
        raise HandoffConfigError(
            f"The draft's config names target layers {spec.layer_ids}, but this target "
            f"maps them to {tuple(captured)}. A tail from prefill is not supported for "
            "this pair; run DSPARK on prefill."
        )
    if not (spec.covers_draft or draft.is_masked or draft.is_clearable):
        raise HandoffConfigError(
            f"Draft KV pool {type(pool).__name__} keeps no entry per token slot, so what "
            "a partial tail leaves open cannot be cleared. Let the tail cover the "
            "draft's window, or run DSPARK on prefill."
        )
    tail = _build_tail(spec, buffers, size)
    dspark_handoff.activate(tail=tail)
    return tails.TailMetadataBuffers.of(buffers, tail)


def _build_tail(spec: TailSpec, buffers: MetadataBuffers, size: int) -> TailBuffer:
    import psutil

    from sglang.srt.speculative.dspark_components.dspark_handoff_tail import TailBuffer

    wanted = size * spec.slot_bytes
    available = psutil.virtual_memory().available
    if wanted > available // 2:
        raise HandoffConfigError(
            f"A tail of {spec.tail_tokens} tokens needs {size} slots of "
            f"{spec.slot_bytes} bytes, {wanted >> 20} MiB in all; {available >> 20} "
            f"MiB are free. Lower {rules.TAIL_TOKENS} or --max-running-requests."
        )
    logger.info(
        "DSpark handoff: %d metadata slots of %d bytes, %.1f MiB of host memory.",
        size,
        spec.slot_bytes,
        wanted / (1 << 20),
    )
    return TailBuffer(spec, size, device=buffers.bootstrap_room.device)
