"""Checks of the doctor beyond the agreement: what one engine, or the pair, cannot do.

Each row is data like the agreement's: a code, a severity, when it applies and three
sentences. The agreement compares what both engines say at run time; these rows read
flags, so that a refusal at start, a silent loss or a missing variable shows before.
"""

from __future__ import annotations

from dspark_pd.doctor_agreement import NOTE, REFUSE, WARN, Finding
from dspark_pd.doctor_conditions import (
    STAGED_CAPTURE,
    Check,
    both_known_and_differ,
    checksum_on_one,
    drafts,
    file_backend_without_folder,
    is_on,
    lacks_layer_ids,
    no_handoff_for,
    runs_as,
    stages,
    stages_cannot_capture,
    wrong_role,
)
from dspark_pd.doctor_fields import CAPTURE, HICACHE_FOLDER, LAYER_IDS, TAIL_TOKENS
from dspark_pd.doctor_inputs import Engine, Unread
from dspark_pd.doctor_releases import served_by
from dspark_pd.doctor_tail_checks import TAIL_CHECKS

_PAIR_CHECKS: tuple[Check, ...] = (
    Check(
        "DOC-ROLE",
        REFUSE,
        lambda p, d: wrong_role(p) or wrong_role(d),
        "the engine given as --prefill runs with {prefill_mode}, the one given as "
        "--decode with {decode_mode}",
        "requests would find no peer",
        "swap the two if they are the wrong way round, or start them with --disaggregation-mode prefill and decode",
    ),
    Check(
        "DOC-RELEASE",
        WARN,
        lambda p, d: p.release and d.release and p.release != d.release,
        "the engines run different releases of SGLang",
        "the transfer protocol is kept compatible within a release only",
        "run the same release on both",
    ),
    Check(
        "DOC-CHECKSUM",
        WARN,
        lambda p, d: p.mode != "tail" and checksum_on_one(p, d),
        "the KV checksum is enabled on one engine only",
        "transferred KV is not verified",
        "give --disaggregation-enable-kv-checksum to both or to none",
    ),
    Check(
        "DOC-CHECKSUM-TAIL",
        REFUSE,
        lambda p, d: p.mode == "tail" and checksum_on_one(p, d),
        "the KV checksum is enabled on one engine only, and prefill hands over a tail",
        "metadata buffers pair by position and no longer line up",
        "give --disaggregation-enable-kv-checksum to both or to none",
    ),
    Check(
        "DOC-DTYPE",
        REFUSE,
        both_known_and_differ("dtype"),
        "the engines compute in different dtypes",
        "KV (and hidden rows) of one cannot be read by the other",
        "give both the same --dtype",
    ),
    Check(
        "DOC-TAIL-RELEASE",
        REFUSE,
        lambda p, d: p.mode == "tail" and (no_handoff_for(p) or no_handoff_for(d)),
        "prefill is to capture a tail, but an engine's release cannot hand one over",
        "the variables of the tail are ignored there and the draft starts cold",
        f"run SGLang {served_by('handoff')} with the component handoff on both, or run "
        "DSPARK on prefill",
    ),
    Check(
        "DOC-DECODE-STAGES",
        REFUSE,
        lambda p, d: drafts(d) and stages(d) > 1,
        "decode runs DSPARK with pipeline stages",
        "SGLang refuses to start it",
        "run decode with --pp-size 1; prefill may keep its stages",
    ),
    Check(
        "DOC-STAGED-CAPTURE",
        REFUSE,
        stages_cannot_capture,
        "prefill's model does not hand captured rows from stage to stage",
        "prefill fails at start or at its first batch",
        "run prefill with --pp-size 1, or use one of: " + ", ".join(STAGED_CAPTURE),
    ),
    Check(
        "DOC-CAPTURE-PLACE",
        REFUSE,
        lambda p, d: (
            is_on(d, CAPTURE) or (is_on(p, CAPTURE) and p.has("speculative_algorithm"))
        ),
        f"{CAPTURE} is set on decode, or on a prefill that speculates itself",
        "with the component handoff that engine refuses to start",
        "set it on prefill only, and give prefill no --speculative-algorithm",
    ),
    Check(
        "DOC-TAIL-IDLE",
        REFUSE,
        lambda p, d: (
            (not is_on(p, CAPTURE) and bool(p.env(TAIL_TOKENS) or p.env(LAYER_IDS)))
            or bool(d.env(LAYER_IDS) and not d.env(TAIL_TOKENS))
        ),
        "an engine has variables of a tail that it neither captures nor expects",
        "with the component handoff it refuses to start",
        f"set {CAPTURE}=1 on the prefill that hands over rows and {TAIL_TOKENS} on "
        "both engines, or unset them",
    ),
    Check(
        "DOC-LAYER-IDS",
        REFUSE,
        lacks_layer_ids,
        "prefill captures hidden rows but nothing says of which layers",
        "prefill refuses to start",
        f"set {LAYER_IDS} to the layer ids of decode's draft, or give prefill "
        "--speculative-draft-model-path (no weights are loaded)",
    ),
    Check(
        "DOC-DP-LM-HEAD",
        REFUSE,
        lambda p, d: any(
            drafts(e)
            and e.has("enable_dp_attention")
            and not e.has("enable_dp_lm_head")
            for e in (p, d)
        ),
        "an engine runs DSPARK with data-parallel attention and without its LM head",
        "SGLang refuses to start it",
        "add --enable-dp-lm-head",
    ),
    Check(
        "DOC-CP-CAPTURE",
        REFUSE,
        lambda p, d: p.mode == "tail" and int(p.arg("attn_cp_size") or 1) > 1,
        "prefill captures hidden rows under context parallelism",
        "rows are spread over ranks; prefill refuses to start",
        "run prefill without context parallelism",
    ),
    Check(
        "DOC-DECODE-HICACHE",
        REFUSE,
        lambda p, d: p.mode == "tail" and d.has("enable_hierarchical_cache"),
        "decode has a hierarchical cache and takes a tail",
        "a prefix restored from host memory has no draft KV",
        "disable --enable-hierarchical-cache on decode, or run DSPARK on prefill",
    ),
    Check(
        "DOC-DECODE-HISPARSE",
        REFUSE,
        lambda p, d: drafts(d) and d.has("enable_hisparse"),
        "decode runs DSPARK with HiSparse",
        "its staged batches cannot carry DSPARK's draft input",
        "run decode without --enable-hisparse",
    ),
    Check(
        "DOC-TAIL-RADIX",
        NOTE,
        lambda p, d: p.mode == "tail" and not p.has("disable_radix_cache"),
        "prefill reuses prefixes and captures a tail",
        "matches end before the tail, so each hit recomputes that many tokens",
        "nothing to do",
    ),
    Check(
        "DOC-HICACHE-FOLDER",
        WARN,
        file_backend_without_folder,
        "prefill stores KV in files but no folder is set",
        "all engines of this machine share the default folder",
        f"set {HICACHE_FOLDER} on prefill",
    ),
    Check(
        "DOC-HICACHE-LAYOUT",
        REFUSE,
        lambda p, d: (
            p.arg("hicache_mem_layout") == "page_first_direct"
            and p.arg("hicache_io_backend") not in (None, "direct")
        ),
        "prefill's hierarchical cache has a layout its I/O backend cannot copy",
        "prefill fails at start or falls back to another layout",
        "use --hicache-io-backend direct with page_first_direct",
    ),
    Check(
        "DOC-HICACHE-COLD",
        WARN,
        lambda p, d: (
            p.has("enable_hierarchical_cache")
            and drafts(d)
            and not drafts(p)
            and p.mode == "none"
        ),
        "prefill caches target KV only",
        "prefixes stored now have no draft KV, also after DSPARK is enabled on prefill",
        "empty the cache when DSPARK is enabled on prefill",
    ),
)
CHECKS = (*_PAIR_CHECKS, *TAIL_CHECKS)


def engine_findings(prefill: Engine, decode: Engine) -> list[Finding]:
    """Findings of all rows that apply."""
    modes = {"prefill_mode": runs_as(prefill), "decode_mode": runs_as(decode)}
    return [
        Finding(
            row.code,
            row.severity,
            row.message.format(**modes),
            row.consequence,
            row.fix,
        )
        for row in CHECKS
        if _applies(row, prefill, decode)
    ]


def _applies(row: Check, prefill: Engine, decode: Engine) -> bool:
    try:
        return bool(row.applies(prefill, decode))
    except Unread:
        return False
