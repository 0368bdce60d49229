"""What a pair of engines must have in common with unified serving.

Equal output is necessary and proves little: verification repairs every wrong draft, so
text is the same with garbage in the draft's KV. The number of verify passes of each
request is what changes when the draft lacks part of its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_prompts import CHUNK, PROMPT_SETS, References

from dspark_pd.bed import (
    MODELS,
    Bed,
    Client,
    Engine,
    EngineSpec,
    Reply,
    Router,
    RouterSpec,
)
from dspark_pd.bed.models import check_checkpoint

GAMMA = 4
# Of one request, from each stage to each rank of decode.
METADATA_BYTES = 1600


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine behind a router."""

    prefill: Engine
    decode: Engine
    router: Router

    @property
    def client(self) -> Client:
        return Client.router(self.router)

    @property
    def direct(self) -> Client:
        return Client.direct(self.prefill, self.decode)


def native_specs(name: str, **options: object) -> list[EngineSpec]:
    """Prefill and decode with DSPARK on both; prefill works in small chunks."""
    target, draft = MODELS.target, MODELS.draft_full
    chunk = options.pop("chunked_prefill", CHUNK)
    return [
        EngineSpec(
            f"{name}-p", "prefill", target, draft, chunked_prefill=chunk, **options
        ),
        EngineSpec(f"{name}-d", "decode", target, draft, **options),
    ]


def route(bed: Bed, prefill: Engine, decode: Engine) -> Pair:
    """Put a router before two engines."""
    spec = RouterSpec(
        f"router-{prefill.name}-{decode.name}", [prefill.endpoint], [decode.endpoint]
    )
    return Pair(prefill, decode, bed.start_router(spec))


def verify_vector(replies: Sequence[Reply]) -> list[int]:
    """Verify passes of each request."""
    return [reply.verify_steps for reply in replies]


def accept_length(replies: Sequence[Reply]) -> float:
    """Completion tokens per verify pass, over all requests."""
    return sum(r.completion_tokens for r in replies) / sum(verify_vector(replies))


def assert_same_output(
    replies: Sequence[Reply], name: str, references: References
) -> None:
    """Token by token what the target alone would have said."""
    plain = [reply.output_ids for reply in references.get(name, None)]
    assert [reply.output_ids for reply in replies] == plain


def assert_parity(
    replies: Sequence[Reply],
    name: str,
    references: References,
    draft: Path = MODELS.draft_full,
) -> None:
    """Same tokens as without speculation, same verify passes as unified serving."""
    unified = references.get(name, draft)
    assert_same_output(unified, name, references)
    assert_same_output(replies, name, references)
    assert all(verify_vector(replies)), "speculation was off"
    assert verify_vector(replies) == verify_vector(unified)
    assert accept_length(replies) / accept_length(unified) == 1.0


def kv_bytes_per_token(*models: Path) -> int:
    """K and V of all layers of these checkpoints, in float32."""
    total = 0
    for folder in models:
        config = check_checkpoint(folder, "model")
        heads = config["num_key_value_heads"] * config["head_dim"]
        total += config["num_hidden_layers"] * 2 * heads * 4
    return total


def assert_moved(moved: int, name: str, copies: int = 4) -> None:
    """KV of target and draft, `copies` times the metadata, and little beside them."""
    lengths = [len(prompt.ids) for prompt in PROMPT_SETS[name]]
    kv = sum(lengths) * kv_bytes_per_token(MODELS.target, MODELS.draft_full)
    assert kv <= moved <= 1.02 * (kv + len(lengths) * copies * METADATA_BYTES)


def assert_both_paths_ran(replies: Sequence[Reply], gamma: int = GAMMA) -> None:
    """Some drafts were accepted and some refused, or the comparison shows nothing."""
    assert 1.0 < accept_length(replies) < gamma + 1


def largest_batch(decode: Engine) -> int:
    """Most requests that one decode step of this engine has served, from its log."""
    import re

    sizes = re.findall(r"Decode batch.*?#running-req: (\d+)", decode.log_text())
    return max(map(int, sizes), default=0)
