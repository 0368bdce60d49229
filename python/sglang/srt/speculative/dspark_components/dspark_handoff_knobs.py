"""The knobs of the draft-less prefill handoff, read strictly.

Environment fields fall back to their default when they do not parse; here a value that
cannot be meant stops the engine before it starts, with what to set instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sglang.srt.environ import EnvBool, envs

AUTO_TAIL = -1
MAX_TAIL_TOKENS = 4096


class HandoffConfigError(ValueError):
    """A knob of the handoff that cannot work, with what to set instead."""


def capture_enabled() -> bool:
    """Whether this process belongs to a prefill engine that captures rows.

    Raises:
        HandoffConfigError: the switch is neither on nor off.
    """
    return _read_switch(envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.name)


def partial_context_allowed() -> bool:
    """Whether a tail may cover less than the draft reads; raises as above."""
    return _read_switch(envs.SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT.name)


def cold_draft_allowed() -> bool:
    """Whether decode takes requests without draft context; raises as above.

    Declared with the agreement between the engines, which may not be applied.
    """
    return _read_switch("SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT")


def _read_switch(name: str) -> bool:
    raw = os.environ.get(name)
    if raw is None:
        return False
    try:
        return EnvBool(False).parse(raw.strip())
    except ValueError:
        raise HandoffConfigError(
            f"{name}={raw!r}: expected 1 or 0. Set one of them, or unset it."
        ) from None


def refuse_idle_knobs(mode: str) -> None:
    """Refuse knobs of a capture that nothing switches on.

    Args:
        mode: ``--disaggregation-mode`` of an engine that does not capture.

    Raises:
        HandoffConfigError: the engine would start and hand over nothing.
    """
    idle = []
    if envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.is_set() and not (
        mode == "decode" and tail_expected()
    ):
        idle.append(envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.name)
    if mode == "prefill" and tail_expected():
        idle.append(envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.name)
    if idle:
        switch = envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.name
        raise HandoffConfigError(
            f"{' and '.join(idle)} set without {switch}: this engine would keep no "
            f"rows. Set {switch}=1 if it is the prefill that hands over rows, or unset "
            f"{' and '.join(idle)}."
        )


def tail_expected() -> bool:
    """Whether a DSPARK decode was told to expect rows from its prefill.

    Naming the tail length is the switch: a decode without it keeps the metadata
    buffers, and so the wire format, of a server that knows nothing of the handoff.
    """
    return envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.is_set()


def read_tail_tokens() -> int:
    """The knob as a number, without upstream's silent fall-back to the default.

    Raises:
        HandoffConfigError: not a number, zero, below -1 or above the limit.
    """
    field = envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS
    raw = os.environ.get(field.name, str(field.default)).strip()
    tokens = _as_int(raw) or 0
    if tokens == AUTO_TAIL or 0 < tokens <= MAX_TAIL_TOKENS:
        return tokens
    raise HandoffConfigError(
        f"{field.name}={raw!r}: expected a number of rows from 1 to {MAX_TAIL_TOKENS}, "
        f"or {AUTO_TAIL} for as many as the draft's window needs. Set it to the same "
        "value on prefill and decode."
    )


def _as_int(raw: str) -> int | None:
    try:
        return int(raw)
    except ValueError:
        return None


def read_layer_ids() -> tuple[int, ...] | None:
    """Target layer ids named in the environment, None when unset.

    Raises:
        HandoffConfigError: something in the list is not a number.
    """
    field = envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS
    raw = field.get()
    if not raw:
        return None
    try:
        return tuple(int(item) for item in raw)
    except ValueError:
        raise HandoffConfigError(
            f"{field.name}={','.join(raw)!r}: expected target layer ids separated by "
            "commas, such as 1,9,17. Copy target_layer_ids of the draft's config.json."
        ) from None


def check_layer_ids(
    layer_ids: Sequence[int], *, num_layers: int, last_layer_ok: bool
) -> None:
    """Refuse ids that no stage could capture or whose rows would be misordered.

    Raises:
        HandoffConfigError: empty, repeated, descending, too many, out of range, or the
            last layer of a model that captures a layer at the next layer's input.
    """
    name = envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.name
    found = ",".join(str(layer_id) for layer_id in layer_ids)
    reason = None
    if not layer_ids:
        reason = "it names no layer"
    elif len(layer_ids) > num_layers:
        reason = f"it names {len(layer_ids)} layers of a target that has {num_layers}"
    elif len(set(layer_ids)) != len(layer_ids):
        reason = "it repeats a layer"
    elif list(layer_ids) != sorted(layer_ids):
        reason = "it is not in ascending order, the order in which rows are captured"
    elif layer_ids[0] < 0 or layer_ids[-1] >= num_layers:
        reason = f"the target's layers are 0 to {num_layers - 1}"
    elif layer_ids[-1] == num_layers - 1 and not last_layer_ok:
        reason = (
            f"layer {num_layers - 1} is the target's last: this model hands a layer's "
            "output over at the next layer's input, and there is none"
        )
    if reason is not None:
        raise HandoffConfigError(
            f"{name}={found}: {reason}. Copy target_layer_ids of the draft's config."
        )


def refuse_client_rows(requested_mode: Any) -> None:
    """Refuse a client that asks a capturing prefill for hidden states.

    Raises:
        ValueError: shown to the client.
    """
    if capture_enabled() and requested_mode.need_capture():
        raise ValueError(
            "This prefill engine keeps hidden states for a handoff to decode and "
            "returns none to clients. Ask for return_hidden_states elsewhere, or unset "
            f"{envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.name}."
        )


# A DeepSeek-V4 target keeps wider compressor rings when it speculates, and the rings
# travel: a prefill without a draft must allocate those of its decode.
_peer_draft_tokens = 0


def expect_peer_draft_tokens(hf_config: Any) -> None:
    """Learn the decode's draft tokens for a DeepSeek-V4 target.

    In order: the environment; the block size of a draft bundled in the checkpoint.

    Raises:
        HandoffConfigError: neither says, or the number cannot be one.
    """
    global _peer_draft_tokens
    from sglang.srt.configs.model_config import is_deepseek_v4

    field = envs.SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS
    found = os.environ.get(field.name)
    if found is not None:
        tokens = _as_int(found) or 0
    else:
        block = getattr(hf_config, "dspark_block_size", None)
        tokens = int(block) + 1 if block else 0
    if tokens < 2 and (found is not None or is_deepseek_v4(hf_config)):
        shown = "unset" if found is None else repr(found)
        raise HandoffConfigError(
            f"{field.name}={shown}: a DeepSeek-V4 prefill without a draft must know "
            "how many tokens its decode verifies at once, block size + 1, to keep "
            "compressor rings of the same size. Set it to --speculative-num-draft-"
            "tokens of the decode."
        )
    if is_deepseek_v4(hf_config):
        _peer_draft_tokens = tokens


def peer_draft_tokens() -> int:
    """Draft tokens of the decode this prefill hands over to; 0 when not capturing."""
    return _peer_draft_tokens
