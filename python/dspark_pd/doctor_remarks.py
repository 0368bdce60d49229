"""What the doctor says about reading an engine, before anything is compared.

Each row is data like `doctor_checks.CHECKS`, with fields in its sentences; the page on
agreement lists both.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_pd.doctor_agreement import REFUSE, WARN, Finding


@dataclass(frozen=True)
class Remark:
    """One row; the texts are templates for ``str.format``."""

    code: str
    severity: str
    message: str
    consequence: str
    fix: str


_NOT_COMPARED = "what depends on it is not compared"

REMARKS: dict[str, Remark] = {
    "value": Remark(
        "DOC-ARGS",
        WARN,
        "{role}: the value of {name}, {shown}, is not known from {source}",
        _NOT_COMPARED,
        "write the value into the file, or set the variable for the doctor",
    ),
    "source": Remark(
        "DOC-ARGS",
        WARN,
        "{role}: {shown} in {source} is not read",
        "what it may set is not compared",
        "write what it sets into the file, or give the address of the running engine",
    ),
    "misspelt": Remark(
        "DOC-ARGS",
        WARN,
        "{role}: {shown} in {source} is unknown here; {meant} may be meant",
        "SGLang refuses unknown flags and ignores unknown variables; " + _NOT_COMPARED,
        "correct the spelling",
    ),
    "several": Remark(
        "DOC-ARGS",
        WARN,
        "{role}: {source} starts {count} engines; {taken} was read",
        "the others are not compared",
        "give each engine a file of its own",
    ),
    "malformed": Remark(
        "DOC-VALUE",
        REFUSE,
        "{role}: {name} is {shown}, not {wanted}",
        "SGLang refuses to start with it",
        "correct the value",
    ),
    "odd": Remark(
        "DOC-VALUE",
        WARN,
        "{role}: {source} answers {name} {shown}, not {wanted}",
        _NOT_COMPARED,
        "check that the address is that of an SGLang engine",
    ),
    "config": Remark(
        "DOC-CONFIG",
        WARN,
        "the config of {role}'s model {model} cannot be read on this machine",
        "models, drafts and DeepSeek-V4 rings are not compared",
        "run the doctor where the model lies",
    ),
    "no model": Remark(
        "DOC-CONFIG",
        WARN,
        "{role}: {source} names no --model-path",
        "models, drafts and DeepSeek-V4 rings are not compared",
        "name the model where the engine is started",
    ),
    "damaged": Remark(
        "DOC-CONFIG",
        WARN,
        "the config of {role}'s model, or of its draft, cannot be understood: {detail}",
        "the engines are compared by their flags alone",
        "repair the config.json of the model or of its draft",
    ),
    "unreachable": Remark(
        "DOC-UNREACHABLE",
        REFUSE,
        "{role} at {source} does not answer: {detail}",
        "nothing can be compared",
        "check the address and that the engine has finished starting",
    ),
    "locked": Remark(
        "DOC-UNREACHABLE",
        REFUSE,
        "{role} at {source} asks for an API key (HTTP {status})",
        "nothing can be compared",
        "give --api-key-env NAME, where the variable NAME holds the key",
    ),
    "wrong key": Remark(
        "DOC-UNREACHABLE",
        REFUSE,
        "{role} at {source} refuses the API key (HTTP {status})",
        "nothing can be compared",
        "check the key in the variable that --api-key-env names",
    ),
    "bootstrap": Remark(
        "DOC-BOOTSTRAP",
        WARN,
        "prefill's bootstrap server at {place} does not answer: {detail}",
        "decodes cannot reach this prefill, or it is behind another address",
        "open the port given by --disaggregation-bootstrap-port",
    ),
    "no bootstrap": Remark(
        "DOC-BOOTSTRAP",
        WARN,
        "prefill at {source} names no bootstrap port",
        "whether it describes itself to its peers is not known",
        "start it with --disaggregation-mode prefill",
    ),
    "unpatched": Remark(
        "DOC-UNPATCHED",
        WARN,
        "{role} does not describe itself to its peers",
        "engines that disagree hang or draft cold instead of refusing each other",
        "apply sglang-dspark-pd to it and restart it",
    ),
    "no handshake": Remark(
        "DOC-UNPATCHED",
        WARN,
        "{role} runs SGLang {release}, on which engines do not describe themselves, "
        "with or without sglang-dspark-pd",
        "engines that disagree hang or draft cold instead of refusing each other",
        "run one of SGLang {served} with the set, or keep the flags of both equal",
    ),
}


def remark(row_name: str, /, **fields: object) -> Finding:
    """Return the finding of a row with its fields filled in."""
    row = REMARKS[row_name]
    texts = (row.message, row.consequence, row.fix)
    return Finding(row.code, row.severity, *(text.format(**fields) for text in texts))
