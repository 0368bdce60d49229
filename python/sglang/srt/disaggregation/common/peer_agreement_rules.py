"""The rows of the agreement between prefill and decode, and the function over them.

Each row is data: a code, a severity, the value it is about, when it applies, and the
three sentences a user reads. Rows are grouped by what they protect; the first
refusal in table order is the one an engine reports.

The import is relative because the doctor loads this folder without SGLang (see
`peer_agreement_table.py`).
"""

from __future__ import annotations

from .peer_agreement_draft_rules import DRAFT_RULES
from .peer_agreement_table import (
    ALLOW_COLD_DRAFT,
    COLD,
    PEER_DRAFT_TOKENS,
    REFUSE,
    SEVERITIES,
    STAGES_GUESSED,
    STAGES_MISSED,
    WARN,
    Description,
    Pair,
    Rule,
    Verdict,
    differs,
)


def _is_unpatched_prefill(pair: Pair) -> bool:
    return not pair.prefill.get("version") and bool(pair.decode.get("version"))


def _is_unpatched_decode(pair: Pair) -> bool:
    return not pair.decode.get("version") and bool(pair.prefill.get("version"))


def _counts_kv_regions(pair: Pair) -> bool:
    """Backends on which engines of one model register alike, so that counts compare."""
    return pair.prefill.get("backend") in ("nixl", "mooncake")


def _unpatched_decode_may_be_cold(pair: Pair) -> bool:
    return (
        _is_unpatched_decode(pair)
        and pair.prefill_mode == "none"
        and _counts_kv_regions(pair)
        and (pair.extra_decode_entries or 0) > 0
        and not pair.cold_allowed
    )


def _unpatched_decode_lacks_draft(pair: Pair) -> bool:
    return (
        _is_unpatched_decode(pair)
        and pair.prefill_mode == "native"
        and _counts_kv_regions(pair)
        and (pair.extra_decode_entries or 0) < 0
    )


def _stages_miss_their_layers(pair: Pair) -> bool:
    if not pair.described or (pair.prefill.get("pp") or 1) <= (
        pair.decode.get("pp") or 1
    ):
        return False
    ids = pair.both("kv_layer_ids")
    if None in ids or all(ids):
        return False
    pairing = pair.prefill.get("stage_pairing")
    if any(ids):  # one engine reports ids and the other none: both backends raise
        return pairing is not None
    if pairing == STAGES_GUESSED:
        return pair.has_draft
    return pairing == STAGES_MISSED


def _stages_do_not_pair(pair: Pair) -> bool:
    prefill, decode = pair.both("pp")
    return None not in (prefill, decode) and decode not in (1, prefill)


def _ranks_do_not_divide(pair: Pair) -> bool:
    prefill, decode = pair.both("tp")
    if None in (prefill, decode):
        return False
    return max(prefill, decode) % min(prefill, decode) != 0


def _decode_has_context_parallel(pair: Pair) -> bool:
    return (pair.decode.get("cp") or 1) > 1


def _checksum_on_one_engine(pair: Pair) -> bool:
    """One engine has all buffers of the other, then the checksum as its last."""
    shorter, longer = sorted((aux or [] for aux in pair.both("aux")), key=len)
    return (
        pair.described
        and pair.prefill_mode != "tail"
        and len(longer) == len(shorter) + 1
        and longer[:-1] == shorter
        and longer[-1].partition(":")[0] == CHECKSUM_BUFFER
    )


def _aux_layouts_clash(pair: Pair) -> bool:
    """Names must agree always; widths where DSPARK or a tail is involved.

    The draft's hidden state is the one buffer whose width follows the algorithm, and
    what other algorithms do with it on one engine alone is not ours to refuse.
    """
    if not (pair.described and pair.differ("aux")) or _checksum_on_one_engine(pair):
        return False
    names = [[entry.partition(":")[0] for entry in aux] for aux in pair.both("aux")]
    ours = "DSPARK" in pair.both("algorithm") or pair.prefill_mode == "tail"
    return names[0] != names[1] or ours


CHECKSUM_BUFFER = "kv_checksum"


ENGINE_RULES: tuple[Rule, ...] = (
    # -- can the two talk at all ----------------------------------------------------
    Rule(
        "PD-VERSION",
        REFUSE,
        "version",
        lambda p: p.described and p.differ("version"),
        "the engines speak different versions of the peer description",
        "neither engine can check the other",
        "apply the same release of sglang-dspark-pd to both engines",
    ),
    Rule(
        "PD-RANKS",
        REFUSE,
        "conflict",
        lambda p: bool(p.prefill.get("conflict")),
        "the ranks of the prefill engine describe themselves differently",
        "requests would depend on the rank that serves them",
        "start every rank of the prefill engine with the same flags and environment",
    ),
    Rule(
        "PD-UNPATCHED-PREFILL",
        REFUSE,
        "version",
        lambda p: _is_unpatched_prefill(p) and p.decode_drafts and not p.cold_allowed,
        "decode runs DSPARK but the prefill engine does not describe itself "
        "(SGLang without this agreement)",
        "whether the draft gets its context cannot be checked: " + COLD,
        "apply sglang-dspark-pd to prefill as well, or skip the check with "
        f"{ALLOW_COLD_DRAFT}=1 on decode",
    ),
    Rule(
        "PD-UNPATCHED-PREFILL-ALLOWED",
        WARN,
        "version",
        lambda p: _is_unpatched_prefill(p) and p.decode_drafts and p.cold_allowed,
        "decode runs DSPARK with a prefill engine that does not describe itself",
        COLD,
        "apply sglang-dspark-pd to prefill as well",
    ),
    Rule(
        "PD-UNPATCHED-PREFILL-PLAIN",
        WARN,
        "version",
        lambda p: _is_unpatched_prefill(p) and not p.decode_drafts,
        "the prefill engine does not describe itself (SGLang without this agreement)",
        "if it runs a speculative algorithm, its bootstrap thread dies at this "
        "decode's registration and its requests hang",
        "apply sglang-dspark-pd to prefill as well",
    ),
    Rule(
        "PD-UNPATCHED-DECODE-TAIL",
        REFUSE,
        "version",
        lambda p: _is_unpatched_decode(p) and p.prefill_mode == "tail",
        "prefill hands over a tail of hidden rows but the decode engine does not "
        "describe itself (SGLang without this agreement)",
        "decode would ignore the tail and draft cold",
        "apply sglang-dspark-pd to decode as well",
    ),
    Rule(
        "PD-UNPATCHED-DECODE-NO-DRAFT",
        REFUSE,
        "kv_entries",
        _unpatched_decode_lacks_draft,
        "prefill ships draft KV but the decode engine registered fewer KV regions",
        "there is no memory on decode for the draft KV",
        "start decode with --speculative-algorithm DSPARK and the same draft, or "
        "prefill without it",
    ),
    Rule(
        "PD-UNPATCHED-DECODE-COLD",
        WARN,
        "kv_entries",
        _unpatched_decode_may_be_cold,
        "the decode engine registered more KV regions than prefill has, as with a "
        "draft, and does not describe itself",
        "if that draft is DSPARK's, " + COLD,
        "apply sglang-dspark-pd to decode as well, or start prefill with the decode "
        f"engine's draft; {ALLOW_COLD_DRAFT}=1 on prefill accepts it",
    ),
    Rule(
        "PD-UNPATCHED-DECODE",
        WARN,
        "version",
        lambda p: (
            _is_unpatched_decode(p)
            and p.prefill_mode != "tail"
            and not _unpatched_decode_lacks_draft(p)
            and not _unpatched_decode_may_be_cold(p)
        ),
        "the decode engine does not describe itself (SGLang without this agreement)",
        "draft checkpoint, layer ids and block size are not compared",
        "apply sglang-dspark-pd to decode as well",
    ),
    # -- the target's KV ------------------------------------------------------------
    Rule(
        "PD-BACKEND",
        REFUSE,
        "backend",
        lambda p: p.differ("backend"),
        "the engines use different transfer backends",
        "decode's registration cannot be understood by prefill",
        "give both engines the same --disaggregation-transfer-backend",
    ),
    Rule(
        "PD-ALLOCATION",
        REFUSE,
        "allocation_policy",
        lambda p: p.differ("allocation_policy"),
        "the engines reserve decode's KV at different points of a request",
        "decode refuses each request by itself, and prefill holds it until its timeout",
        "give both engines the same --disaggregation-decode-allocation-policy",
    ),
    Rule(
        "PD-TARGET",
        REFUSE,
        "target",
        lambda p: p.differ("target"),
        "the engines serve different target models",
        "KV of one model would be read as KV of the other",
        "give both engines the same --model-path",
    ),
    Rule(
        "PD-PAGE-SIZE",
        REFUSE,
        "page_size",
        lambda p: p.differ("page_size"),
        "the engines page their KV cache differently",
        "page indices of one engine mean other tokens on the other",
        "give both engines the same --page-size",
    ),
    Rule(
        "PD-KV-DTYPE",
        REFUSE,
        "kv_dtype",
        lambda p: p.differ("kv_dtype"),
        "the engines store KV in different dtypes",
        "KV bytes would be misread",
        "give both engines the same --kv-cache-dtype (and --dtype)",
    ),
    Rule(
        "PD-KV-STORAGE",
        REFUSE,
        "kv_storage",
        lambda p: p.differ("kv_storage"),
        "the engines' KV pools hold different dtypes",
        "KV bytes would be misread",
        "give both engines the same --dtype, which --kv-cache-dtype auto follows",
    ),
    Rule(
        "PD-AUX",
        REFUSE,
        "aux",
        _aux_layouts_clash,
        "the engines transfer different metadata buffers",
        "slots are addressed by position and width, so values would land elsewhere",
        "run the same --speculative-algorithm; enable "
        "SGLANG_ENABLE_DISAGG_SAMPLING_MASK and the DSA top-k buffer on both engines or "
        "on none, and with a tail --disaggregation-enable-kv-checksum as well",
    ),
    Rule(
        "PD-AUX-CHECKSUM",
        WARN,
        "aux",
        _checksum_on_one_engine,
        "one engine transfers a KV checksum and the other does not",
        "transferred KV is not verified",
        "give --disaggregation-enable-kv-checksum to both engines or to none",
    ),
    # -- parallel layouts -----------------------------------------------------------
    Rule(
        "PD-TP",
        REFUSE,
        "tp",
        _ranks_do_not_divide,
        "the attention tensor-parallel sizes do not divide each other",
        "heads cannot be paired between ranks",
        "choose sizes of which one is a multiple of the other",
    ),
    Rule(
        "PD-PP",
        REFUSE,
        "pp",
        _stages_do_not_pair,
        "decode has pipeline stages that prefill does not have",
        "stages cannot be paired",
        "run decode with --pp-size 1 (DSPARK needs that anyway)",
    ),
    Rule(
        "PD-CP",
        REFUSE,
        "cp",
        _decode_has_context_parallel,
        "decode runs attention context parallelism",
        "decode ranks cannot be paired with prefill ranks",
        "run decode without context parallelism",
    ),
    Rule(
        "PD-PP-LAYER-IDS",
        REFUSE,
        "kv_layer_ids",
        _stages_miss_their_layers,
        "prefill has pipeline stages, the engines do not both report the layers of "
        "their KV buffers, and this backend cannot place a stage without them",
        "the transfer raises, or a stage's KV lands in other layers of decode",
        "apply all components of sglang-dspark-pd to both engines (layer ids: SGLang "
        "0.5.23 and later), or run prefill with --pp-size 1; Mooncake also places "
        "equal stages of an engine pair without any draft",
    ),
    Rule(
        "PD-RING",
        REFUSE,
        "rings",
        differs("rings"),
        "the DeepSeek-V4 compressor rings have different sizes",
        "a ring is shipped whole, so its rows would land in the wrong slots",
        f"set {PEER_DRAFT_TOKENS} on a draft-less prefill to decode's "
        "--speculative-num-draft-tokens, or run the same speculation on both",
    ),
)

RULES: tuple[Rule, ...] = ENGINE_RULES + DRAFT_RULES


def decide(decode: Description, prefill: Description) -> list[Verdict]:
    """All verdicts on a pair, refusals first, each group in table order.

    Pure: the same two descriptions give the same verdicts on either engine and in the
    doctor. An empty list means that nothing known speaks against the pair.
    """
    pair = Pair(decode=decode, prefill=prefill)
    verdicts = [rule.verdict(pair) for rule in RULES if rule.applies(pair)]
    return sorted(verdicts, key=lambda verdict: SEVERITIES.index(verdict.severity))


def refusal(decode: Description, prefill: Description) -> Verdict | None:
    """The verdict that forbids this pair, or None."""
    verdicts = decide(decode, prefill)
    if verdicts and verdicts[0].severity == REFUSE:
        return verdicts[0]
    return None
