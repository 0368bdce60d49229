"""Checks of the doctor beyond the agreement: what one engine, or the pair, cannot do.

Each check is data like the agreement's rules: a code, a severity, when it applies and
three sentences. The agreement compares what both engines say at run time; these read
flags, so that a refusal at start, a silent loss or a missing variable shows before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dspark_pd.doctor.engine import ERROR, NOTE, WARNING, Engine, Finding
from dspark_pd.doctor.fields import (
    BOOTSTRAP_TIMEOUT,
    HICACHE_FOLDER,
    KEEP_ALIVE,
    ON,
    RUST_SERVER,
)
from dspark_pd.doctor.releases import released, served_by, serves
from dspark_pd.doctor.stages import PARTITION, better_partition


@dataclass(frozen=True)
class Check(Finding):
    """A finding and when it is one: ``applies`` gets (prefill, decode)."""

    applies: Callable[[Engine, Engine], Any]


# For idle connections: what sglang-router 0.3.2 does, without a flag, and SGLang's default.
_ROUTER_KEEPS_S = 50
_ENGINE_KEEPS_S = 5


def _wrong_role(engine: Engine) -> bool:
    """Whether an engine is known to run in another role, or in none.

    A file says it all; a server may leave out what it likes.
    """
    mode = engine.args.get("disaggregation_mode")
    return (mode is not None or not engine.running) and mode != engine.role


def _runs_as(engine: Engine) -> str:
    mode = engine.args.get("disaggregation_mode")
    return f"--disaggregation-mode {mode}" if mode else "no --disaggregation-mode"


def _dtypes_differ(prefill: Engine, decode: Engine) -> bool:
    found = {engine.args.get("dtype") for engine in (prefill, decode)}
    return None not in found and len(found) > 1


def _checksum_on_one(prefill: Engine, decode: Engine) -> bool:
    name = "disaggregation_enable_kv_checksum"
    return prefill.has(name) != decode.has(name)


def _no_handoff_for(engine: Engine) -> bool:
    release = released(engine.release)
    return release is not None and not serves("handoff", release)


def _file_backend_without_folder(prefill: Engine, _: Engine) -> bool:
    return (
        prefill.args.get("hicache_storage_backend") == "file"
        and prefill.environ is not None
        and not prefill.environ.get(HICACHE_FOLDER)
    )


def _closes_early(engine: Engine) -> bool:
    environ = engine.environ
    if environ is None:
        return False
    seconds = (environ.get(KEEP_ALIVE) or "").strip()
    known = seconds.isdigit() or not seconds  # another value is a finding of its own
    return known and int(seconds or _ENGINE_KEEPS_S) <= _ROUTER_KEEPS_S


def _drafts_without_head(engine: Engine) -> bool:
    """Whether it drafts with data-parallel attention, in either spelling, alone."""
    groups = engine.has("enable_dp_attention") or engine.size("attn_dp_size") > 1
    return engine.drafts and groups and not engine.has("enable_dp_lm_head")


CHECKS: Final[tuple[Check, ...]] = (
    Check(
        "DOC-ROLE",
        ERROR,
        "the engine given as --prefill runs with {prefill_mode}, the one given as "
        "--decode with {decode_mode}",
        "the two cannot serve a request together",
        "swap the two if they are the wrong way round, or start them with --disaggregation-mode prefill and decode",
        lambda p, d: _wrong_role(p) or _wrong_role(d),
    ),
    Check(
        "DOC-RELEASE",
        WARNING,
        "the engines run different releases of SGLang",
        "SGLang keeps its transfer protocol compatible within one release only",
        "run the same release on both",
        lambda p, d: p.release and d.release and p.release != d.release,
    ),
    Check(
        "DOC-CHECKSUM",
        WARNING,
        "the KV checksum is enabled on one engine only",
        "transferred KV is not verified",
        "give --disaggregation-enable-kv-checksum to both or to none",
        _checksum_on_one,
    ),
    Check(
        "DOC-DTYPE",
        ERROR,
        "the engines compute in different dtypes",
        "KV (and hidden states) of one cannot be read by the other",
        "give both the same --dtype",
        _dtypes_differ,
    ),
    Check(
        "DOC-TAIL-RELEASE",
        ERROR,
        "prefill is set to capture a tail, but one engine runs a release without it",
        "that engine ignores the tail's variables, and the draft starts without context",
        f"run SGLang {served_by('handoff')} with the component handoff on both, or run "
        "DSPARK on prefill",
        lambda p, d: p.mode == "tail" and (_no_handoff_for(p) or _no_handoff_for(d)),
    ),
    Check(
        "DOC-DECODE-STAGES",
        ERROR,
        "decode runs DSPARK with pipeline stages",
        "SGLang refuses to start it",
        "run decode with --pp-size 1; prefill may keep its stages",
        lambda p, d: d.drafts and d.size("pp_size") > 1,
    ),
    Check(
        "DOC-STAGES",
        NOTE,
        "prefill runs DSPARK on {stages} stages, and its last one also holds the draft",
        "the stage with the least room for KV decides how many tokens fit",
        f"{PARTITION}={{partition}} on prefill spreads target and draft layers evenly",
        lambda p, d: better_partition(p),
    ),
    Check(
        "DOC-DP-LM-HEAD",
        ERROR,
        "an engine runs DSPARK with data-parallel attention and without its LM head",
        "SGLang refuses to start it",
        "add --enable-dp-lm-head",
        lambda p, d: any(_drafts_without_head(e) for e in (p, d)),
    ),
    Check(
        "DOC-DECODE-HISPARSE",
        ERROR,
        "decode runs DSPARK with HiSparse",
        "its staged batches cannot carry DSPARK's draft input",
        "run decode without --enable-hisparse",
        lambda p, d: d.drafts and d.has("enable_hisparse"),
    ),
    Check(
        "DOC-RUST-SERVER",
        WARNING,
        f"prefill runs DSPARK with {RUST_SERVER}, whose bootstrap registry passes no "
        "description on",
        "decode cannot check prefill, and refuses it unless it accepts a cold draft",
        f"unset {RUST_SERVER} on prefill",
        lambda p, d: p.drafts and (p.environ or {}).get(RUST_SERVER, "0") in ON,
    ),
    Check(
        "DOC-TAIL-RADIX",
        NOTE,
        "prefill has a prefix cache and captures a tail",
        "a match ends before the tail, so each hit computes the tail's tokens again",
        "nothing to do",
        lambda p, d: p.mode == "tail" and not p.has("disable_radix_cache"),
    ),
    Check(
        "DOC-TIME-LIMIT",
        NOTE,
        "prefill waits 300 s, SGLang's default, for the decode of a request",
        "it does not notice a decode that is gone, and requests on it, and new ones until "
        "the router notices, are answered after that time only",
        f"set {BOOTSTRAP_TIMEOUT}=30 on prefill; more if requests wait longer than that "
        "for a place in decode's KV pool",
        lambda p, d: p.environ is not None and BOOTSTRAP_TIMEOUT not in p.environ,
    ),
    Check(
        "DOC-KEEP-ALIVE",
        NOTE,
        f"an engine closes idle connections before the router does, which keeps them for "
        f"{_ROUTER_KEEPS_S} s; SGLang's default is {_ENGINE_KEEPS_S} s",
        "a request that the router sends at that moment is lost on one engine, and waits "
        "for the time limit of the other",
        f"set {KEEP_ALIVE}=60 on both engines",
        lambda p, d: _closes_early(p) or _closes_early(d),
    ),
    Check(
        "DOC-HICACHE-FOLDER",
        WARNING,
        "prefill stores KV in files but no folder is set",
        "all engines on this machine share the default folder",
        f"set {HICACHE_FOLDER} on prefill",
        _file_backend_without_folder,
    ),
    Check(
        "DOC-HICACHE-LAYOUT",
        ERROR,
        "prefill's hierarchical cache has a layout its I/O backend cannot copy",
        "prefill fails at start or falls back to another layout",
        "use --hicache-io-backend direct with page_first_direct",
        (
            lambda p, d: (
                p.args.get("hicache_mem_layout") == "page_first_direct"
                and p.args.get("hicache_io_backend") not in (None, "direct")
            )
        ),
    ),
    Check(
        "DOC-HICACHE-COLD",
        WARNING,
        "prefill caches target KV only",
        "prefixes stored now have no draft KV, even after DSPARK is enabled on prefill",
        "empty the cache when DSPARK is enabled on prefill",
        (
            lambda p, d: (
                p.has("enable_hierarchical_cache")
                and d.drafts
                and not p.drafts
                and p.mode == "none"
            )
        ),
    ),
)


def check_findings(prefill: Engine, decode: Engine) -> list[Finding]:
    """Findings of all checks that apply."""
    fields = {
        "prefill_mode": _runs_as(prefill),
        "decode_mode": _runs_as(decode),
        "stages": prefill.size("pp_size"),
        "partition": better_partition(prefill),
    }
    found = (check for check in CHECKS if check.applies(prefill, decode))
    return [check.filled(**fields) for check in found]
