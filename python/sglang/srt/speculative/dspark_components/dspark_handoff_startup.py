"""Start-up of the tail handoff: checks, layers to capture, what a scheduler gets.

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
from sglang.srt.speculative.dspark_components.dspark_handoff import facts_of, refuse

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.utils import MetadataBuffers
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        SpecAuxHiddenStateConfig,
    )
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dspark_components.dspark_handoff_decode import Draft

logger = logging.getLogger(__name__)


def validate_server_args(server_args: ServerArgs) -> None:
    """Check the handoff's variables against the resolved server arguments.

    The models' configs are read only where a variable of the handoff is set, or where a
    pipelined prefill captures.

    Raises:
        HandoffConfigError: a combination that cannot work; the message names the
            flag or variable and what to do instead.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    cfg = resolved_view(server_args)
    facts = facts_of(cfg)
    reads_configs = rules.captures(facts) or rules.captures_on_stages(facts)
    if reads_configs or rules.names_tail(facts):
        target = model_config_of(server_args)
        facts = facts_of(cfg, target)
    refuse(facts)
    if rules.is_undescribed(facts):
        logger.warning(
            "With %s the bootstrap registry does not pass on what this prefill says of "
            "itself, so a decode with sglang-dspark-pd refuses it, unless it has %s=1. "
            "Unset %s to let decodes check this prefill.",
            rules.RUST_SERVER,
            rules.ALLOW_COLD_DRAFT,
            rules.RUST_SERVER,
        )
    if rules.captures(facts):
        spec = dspark_handoff.spec_of(facts, target.dtype)
        logger.info(
            "DSpark handoff: prefill captures hidden states of the last %d tokens of "
            "each prompt, target layers %s, %d bytes a token.",
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

    cfg = resolved_view(server_args)
    if is_draft_worker or not rules.captures(facts_of(cfg)):
        return
    facts = facts_of(cfg, model_config)
    spec = dspark_handoff.spec_of(facts, model_config.dtype)
    config.dflash_use_aux_hidden_state = True
    config.dflash_target_layer_ids = list(spec.layer_ids)
    config.is_dspark = True
    # DeepSeek-V4's compressor rings are wider when it speculates, and the rings travel:
    # a prefill without a draft must allocate those of its decode.
    is_v4 = rules.is_deepseek_v4(facts)
    peer_draft_tokens = rules.peer_draft_tokens(facts) if is_v4 else 0
    dspark_handoff.activate(spec=spec, peer_draft_tokens=peer_draft_tokens)


def with_tail(
    scheduler: Scheduler, buffers: MetadataBuffers, size: int
) -> MetadataBuffers:
    """The metadata buffers of a scheduler; those of an engine without a tail as they are.

    Args:
        size: number of metadata slots.

    Raises:
        HandoffConfigError: a capturing prefill's rows do not fit, or a decode that
            wants tails cannot take them.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.disaggregation.agreement.engine_facts import describers
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails

    if dspark_handoff.describe_role not in describers:
        describers.append(dspark_handoff.describe_role)
    # A switch of roles changes the scheduler's, and leaves the arguments alone.
    role = scheduler.disaggregation_mode.value
    if role == "prefill":
        tails.read_registrations()
        return _with_rows(scheduler, buffers)
    if role != "decode" or not scheduler.spec_algorithm.is_dspark():
        return buffers
    slots = tails.TailSlots(size)
    scheduler.req_to_metadata_buffer_idx_allocator = slots
    draft = _draft_of(scheduler, resolved_view(scheduler.server_args))
    dspark_handoff.activate(draft=draft, slots=slots)
    return tails.TailMetadataBuffers.of(buffers)


def _with_rows(scheduler: Scheduler, buffers: MetadataBuffers) -> MetadataBuffers:
    """A capturing prefill's rows, one for each request that it may run at once."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails

    spec = dspark_handoff.current().spec
    # Earlier stages cap prefix matches like the last one but own no hidden states.
    if spec is None or not get_parallel().pp_group.is_last_rank:
        return buffers
    rows = scheduler.req_to_token_pool.req_to_token.shape[0]
    dspark_handoff.activate(tail=tails.TailBuffer.allocate(spec, rows))
    return tails.TailMetadataBuffers.of(buffers)


def _draft_of(scheduler: Scheduler, cfg: ServerArgs) -> Draft:
    from sglang.srt.speculative.dspark_components.dspark_handoff_decode import Draft

    worker, target = scheduler.draft_worker, scheduler.model_config
    config = worker.draft_model_runner.model_config.hf_config
    facts = facts_of(cfg, target, config, role="decode")
    shape = dspark_handoff.shape_of(
        dspark_handoff.DraftFacts(facts["draft_layer_ids"], facts["window_need"]),
        target,
    )
    reason = rules.no_tail(facts) or _misfit(worker, shape)
    if reason is not None and rules.pins_tail(facts):
        raise dspark_handoff.HandoffConfigError(
            f"{rules.TAIL_TOKENS} is set on a decode that cannot take a tail: {reason}. "
            "Unset it, or run DSPARK on prefill."
        )
    return Draft(
        worker.primary_draft_kv_pool,
        shape,
        no_tail=reason,
        pinned_tokens=rules.tail_tokens(facts) if rules.pins_tail(facts) else None,
        shares_slots=cfg.disaggregation_decode_enable_radix_cache,
    )


def _misfit(worker, shape: dspark_handoff.TailSpec) -> str | None:
    """Why draft KV cannot be made from hidden states here, found by doing it."""
    from sglang.srt.speculative.dspark_components.dspark_handoff_decode import warm_up

    captured = worker.model_runner.spec_aux_config.dflash_target_layer_ids
    if tuple(sorted(captured)) != shape.layer_ids:
        return (
            f"the draft's config names target layers {shape.layer_ids}, but this target "
            f"maps them to {tuple(captured)}"
        )
    try:
        warm_up(worker, shape)
    except Exception as error:
        logger.exception("This decode cannot make draft KV from hidden states")
        return f"making draft KV failed: {type(error).__name__}: {error}"
    return None
