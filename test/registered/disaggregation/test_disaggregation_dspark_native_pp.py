"""DSPARK on a prefill with pipeline stages: the last stage writes and sends draft KV.

Claims are made against unified serving: same tokens and the same number of verify passes
for each request, and draft KV as a prefill of one stage would have sent it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pd_parity import (
    Pair,
    assert_both_paths_ran,
    assert_parity,
    largest_batch,
    native_specs,
)
from pd_prompts import CHUNK, PROMPT_SETS, References, send

from dspark_pd.bed import MODELS, Bed, Client, Engine, EngineSpec
from dspark_pd.bed.models import check_checkpoint

pytestmark = pytest.mark.e2e

# Metadata of one request, from each stage.
METADATA_BYTES = 1600


def kv_bytes_per_token() -> int:
    """K and V of all layers, target and draft, in float32."""
    total = 0
    for folder in (MODELS.target, MODELS.draft_full):
        config = check_checkpoint(folder, "model")
        heads = config["num_key_value_heads"] * config["head_dim"]
        total += config["num_hidden_layers"] * 2 * heads * 4
    return total


@pytest.fixture(scope="module")
def prefill(bed: Bed, native_pair: Pair) -> Iterator[Engine]:
    """Two stages; the decode of the one-stage pair takes its requests too."""
    (engine,) = bed.start(native_specs("native-pp2", pp=2)[:1])
    yield engine
    bed.stop(engine)


@pytest.mark.parametrize("name", ["short", "mixed", "chunked", "beyond"])
def test_native_pp2_parity(
    prefill: Engine, native_pair: Pair, references: References, name: str
) -> None:
    replies = send(Client.direct(prefill, native_pair.decode), name)
    assert_parity(replies, name, references)
    assert_both_paths_ran(replies)


def test_native_pp2_alone(
    prefill: Engine, native_pair: Pair, references: References
) -> None:
    """A batch of one has no neighbour that could lend it context."""
    client = Client.direct(prefill, native_pair.decode)
    assert_parity(send(client, "short", parallel=1), "short", references)
