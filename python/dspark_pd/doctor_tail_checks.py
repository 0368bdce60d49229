"""Checks of the doctor for the tail: what an engine with its variables will not start with.

One row for each refusal of the overlay's start-up (`dspark_handoff_startup`) that flags
or variables show before. They speak of files alone: a running engine was not refused.
"""

from __future__ import annotations

from dspark_pd.doctor_agreement import REFUSE
from dspark_pd.doctor_conditions import (
    MAX_TAIL_TOKENS,
    TAIL_BACKENDS,
    AnyOf,
    Check,
    captures,
    expects_tail,
    handoff_is_cold,
    host_receives,
    on_tail_engines,
    other_backend,
    sends_aux_over_tcp,
    shares_partial_context,
    staged_graphs,
    tail_out_of_range,
)
from dspark_pd.doctor_fields import (
    ALLOW_COLD_DRAFT,
    AUX_TCP,
    MEMORY_POOL,
    TAIL_TOKENS,
    flag_of,
)

_NO_START = "with the component handoff {} refuses to start"


def _refused(code: str, role: str, names: tuple[str, ...], why: str) -> Check:
    """A row for flags that an engine of the tail must not have."""
    flags = " or ".join(flag_of(name) for name in names)
    does = "captures a tail" if role == "prefill" else "expects a tail"
    return Check(
        code,
        REFUSE,
        AnyOf(role, names),
        f"{role} {does} and has {flags}",
        f"{why}; " + _NO_START.format(role),
        f"drop it on {role}, or run DSPARK on prefill",
    )


TAIL_CHECKS: tuple[Check, ...] = (
    _refused(
        "DOC-TAIL-TBO",
        "prefill",
        ("enable_two_batch_overlap",),
        "the rows of the two halves cannot be told apart",
    ),
    _refused(
        "DOC-TAIL-PDMUX",
        "prefill",
        ("enable_pdmux",),
        "a prefill that is split by layers skips the capture",
    ),
    _refused(
        "DOC-TAIL-KV-SHARDING",
        "prefill",
        ("enable_kv_cache_sharding",),
        "no draft can follow on decode",
    ),
    _refused(
        "DOC-TAIL-SESSION",
        "prefill",
        ("enable_streaming_session",),
        "a session goes on behind cached tokens, which produce no rows",
    ),
    _refused(
        "DOC-TAIL-HIDDEN-STATES",
        "prefill",
        ("enable_return_hidden_states", "return_hidden_states_mode"),
        "clients would get the captured rows",
    ),
    _refused(
        "DOC-TAIL-AUX-STATES",
        "prefill",
        ("enable_return_aux_hidden_states",),
        "other layers are captured in the same forward",
    ),
    _refused(
        "DOC-TAIL-UNIFIED-MEMORY",
        "decode",
        ("enable_unified_memory",),
        "draft KV lies at physical ids there",
    ),
    Check(
        "DOC-TAIL-DCP",
        REFUSE,
        lambda p, d: expects_tail(d) and int(d.arg("dcp_size") or 1) > 1,
        "decode expects a tail and has --dcp-size above 1",
        "one request's draft KV is split over ranks; " + _NO_START.format("decode"),
        "run decode without decode context parallelism, or run DSPARK on prefill",
    ),
    Check(
        "DOC-TAIL-HOST-RECEIVE",
        REFUSE,
        lambda p, d: expects_tail(d) and host_receives(d),
        "decode expects a tail and has --disaggregation-decode-host-receive-threshold "
        "below 1",
        "requests are staged on the host; " + _NO_START.format("decode"),
        "drop it on decode, or run DSPARK on prefill",
    ),
    Check(
        "DOC-TAIL-ROLE-SWITCH",
        REFUSE,
        on_tail_engines(lambda e: e.has("enable_pd_role_switch")),
        "an engine of a tail has --enable-pd-role-switch",
        "the role decides who captures; " + _NO_START.format("it"),
        "drop it on both engines, or run DSPARK on prefill",
    ),
    Check(
        "DOC-TAIL-GRAPHS",
        REFUSE,
        lambda p, d: captures(p) and staged_graphs(p),
        "prefill captures a tail with pipeline stages and has "
        "--cuda-graph-backend-prefill other than disabled",
        "a graph replays a stage without the rows of earlier ones; "
        + _NO_START.format("prefill"),
        "give prefill --cuda-graph-backend-prefill disabled, or --pp-size 1",
    ),
    Check(
        "DOC-TAIL-BACKEND",
        REFUSE,
        on_tail_engines(other_backend),
        "an engine of a tail has a --disaggregation-transfer-backend other than "
        + " and ".join(TAIL_BACKENDS[:2]),
        "its metadata cannot carry rows; " + _NO_START.format("it"),
        f"use {' or '.join(TAIL_BACKENDS[:2])} on both engines",
    ),
    Check(
        "DOC-TAIL-AUX-TCP",
        REFUSE,
        on_tail_engines(sends_aux_over_tcp),
        f"an engine of a tail has {AUX_TCP} or {MEMORY_POOL} set so that Mooncake sends "
        "metadata another way",
        "rows do not travel over TCP or from device memory; " + _NO_START.format("it"),
        f"unset {AUX_TCP} and {MEMORY_POOL} on both engines",
    ),
    Check(
        "DOC-TAIL-TOKENS",
        REFUSE,
        on_tail_engines(tail_out_of_range),
        f"{TAIL_TOKENS} is neither -1 nor a number from 1 to {MAX_TAIL_TOKENS}",
        _NO_START.format("that engine"),
        "set it to the same number of rows, or -1, on both engines",
    ),
    Check(
        "DOC-DECODE-RADIX",
        REFUSE,
        shares_partial_context,
        "decode reuses prefixes and takes a tail shorter than its draft's context",
        "draft KV of a reused prefix would differ with who came before; "
        + _NO_START.format("decode"),
        "drop --disaggregation-decode-enable-radix-cache on decode, let the tail cover "
        "the draft's window, or run DSPARK on prefill",
    ),
    Check(
        "DOC-DECODE-RADIX-COLD",
        REFUSE,
        lambda p, d: (
            handoff_is_cold(d) and d.has("disaggregation_decode_enable_radix_cache")
        ),
        f"decode reuses prefixes and has {ALLOW_COLD_DRAFT}",
        "draft KV of a reused prefix would differ with who came before; "
        + _NO_START.format("decode"),
        "drop one of the two",
    ),
)
