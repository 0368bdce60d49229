"""What the doctor says about reading an engine, before anything is compared.

Each remark is a finding with fields in its sentences; the page on agreement lists them
with ``checks.CHECKS``.
"""

from __future__ import annotations

from typing import Final

from dspark_pd.doctor.engine import ERROR, WARNING, Finding

_MODELS_NOT_COMPARED: Final = "models, drafts and DeepSeek-V4 rings are not compared"
_NO_AGREEMENT: Final = (
    "engines that disagree hang, or draft without context, instead of being refused"
)

REMARKS: Final[dict[str, Finding]] = {
    "misspelt": Finding(
        "DOC-ARGS",
        WARNING,
        "{role}: {shown} is unknown to dspark-pd; {meant} may be meant",
        "SGLang refuses unknown flags and ignores unknown variables",
        "correct the spelling",
    ),
    "malformed": Finding(
        "DOC-VALUE",
        ERROR,
        "{role}: {name} is {shown}, not {wanted}",
        "SGLang refuses to start with it; the pair is not compared",
        "correct the value",
    ),
    "block size": Finding(
        "DOC-BLOCK-SIZE",
        ERROR,
        "{role}: --speculative-num-draft-tokens is {tokens} and "
        "--speculative-dspark-block-size is {block}",
        "SGLang wants draft tokens = block size + 1 and refuses to start",
        "give only one of the two flags",
    ),
    "config": Finding(
        "DOC-CONFIG",
        WARNING,
        "the config of {role}'s model {model} cannot be read on this machine",
        _MODELS_NOT_COMPARED,
        "run the doctor on a machine that has the model's folder",
    ),
    "no model": Finding(
        "DOC-CONFIG",
        WARNING,
        "{role}: {source} names no --model-path",
        _MODELS_NOT_COMPARED,
        "add --model-path to the engine's command",
    ),
    "damaged": Finding(
        "DOC-CONFIG",
        WARNING,
        "the config of {role}'s model, or of its draft, cannot be understood: {detail}",
        "the engines are compared by their flags alone",
        "correct the config.json of the model or of its draft",
    ),
    "not compared": Finding(
        "DOC-NOT-COMPARED",
        WARNING,
        "not compared: {values}",
        "the engines may differ in these all the same",
        "describe both engines where SGLang can be imported, and run the doctor where "
        "the models and drafts of both can be read",
    ),
    "bootstrap": Finding(
        "DOC-BOOTSTRAP",
        WARNING,
        "prefill's bootstrap server at {place} does not answer: {detail}",
        "decodes cannot reach this prefill, or it has another address for them",
        "open the port given by --disaggregation-bootstrap-port",
    ),
    "no bootstrap": Finding(
        "DOC-BOOTSTRAP",
        WARNING,
        "prefill at {source} names no bootstrap port",
        "the doctor cannot tell whether it describes itself to decodes",
        "start it with --disaggregation-mode prefill",
    ),
    "unpatched": Finding(
        "DOC-UNDESCRIBED",
        WARNING,
        "{role} shows no description of itself (SGLang without sglang-dspark-pd)",
        _NO_AGREEMENT,
        "apply sglang-dspark-pd to it and restart it",
    ),
    "no agreement": Finding(
        "DOC-UNDESCRIBED",
        WARNING,
        "{role} runs SGLang {release}, on which engines do not describe themselves, "
        "with or without sglang-dspark-pd",
        _NO_AGREEMENT,
        "run one of SGLang {served} with the set, or make the flags of both agree",
    ),
}


def remark(name: str, /, **fields: object) -> Finding:
    """Return the finding of a remark with its fields filled in."""
    return REMARKS[name].filled(**fields)
