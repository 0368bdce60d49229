"""Codes of refusals that are not rows: something failed while two engines talked.

Data for the documentation; the code that uses a code spells it out in its message.
Pure standard library (see `peer_agreement_table.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class RuntimeCode(NamedTuple):
    """What a code in a client's error or in a log means."""

    code: str
    where: str
    meaning: str
    fix: str


RUNTIME_CODES: tuple[RuntimeCode, ...] = (
    RuntimeCode(
        "PD-MALFORMED",
        "both",
        "the peer's description cannot be compared",
        "apply the same release of sglang-dspark-pd to both engines",
    ),
    RuntimeCode(
        "PD-UPSTREAM",
        "decode",
        "one of SGLang's own checks of a prefill raised; its text follows the code",
        "as the text says; before this set such an error ended the decode engine",
    ),
    RuntimeCode(
        "PD-INTERNAL",
        "decode",
        "checking a prefill failed in an unforeseen way; the error follows the code",
        "report it with decode's log; requests to other prefills are served",
    ),
    RuntimeCode(
        "PD-RESTARTED",
        "decode",
        "prefill was restarted while the request was under way: it has other DP ranks "
        "now, does not answer any more, or did not get the request's metadata",
        "send the request again",
    ),
    RuntimeCode(
        "PD-NOT-REGISTERED",
        "prefill",
        "metadata came from a decode that prefill does not know, as after a restart of "
        "prefill",
        "nothing to do if it happens once: a decode with this set registers again at "
        "its next request; restart another decode",
    ),
    RuntimeCode(
        "PD-REGISTRATION",
        "prefill",
        "registering a decode raised, as for KV regions that do not fit; the error "
        "follows the code",
        "give both engines the same model, draft and parallel sizes",
    ),
    RuntimeCode(
        "PD-METADATA",
        "prefill",
        "a request's metadata could not be handled; the error follows the code",
        "run the same release on both engines",
    ),
    RuntimeCode(
        "PD-STATUS",
        "decode",
        "a status message of prefill could not be handled; the error follows the code",
        "run the same release on both engines",
    ),
    RuntimeCode(
        "PD-TRANSFER",
        "prefill",
        "sending KV raised in a Mooncake worker; only this request is lost",
        "look at prefill's log for the traceback",
    ),
)
