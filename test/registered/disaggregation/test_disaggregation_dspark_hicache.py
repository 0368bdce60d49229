"""HiCache with file storage on prefill, with the flags of the GPU recipe.

A prefix may come back from device memory, host memory or a file. Each must bring the
draft's KV with it: same tokens, same verify passes as a cold prompt. Which tier
answered is read from `cached_tokens_details`, because a tier that fails is silently
recomputed and gives the same text. With two pipeline stages only the last one has the
draft, and the tiers of both must answer alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pd_mismatch import unhealthy
from pd_parity import assert_both_paths_ran, assert_parity
from pd_prompts import CHUNK, PAGE, References, send

from dspark_pd.bed import MODELS, Bed, Client, Engine, EngineSpec, Reply
from dspark_pd.bed.prompts import make_prompts
from dspark_pd.bed.serve import HICACHE, STORAGE_DIR_ENV

pytestmark = pytest.mark.e2e

# Device memory holds 16 pages: the prompts under test and little else, so that the
# fillers push them out of it while host memory (twice as much) still has them.
DEVICE_TOKENS = 16 * PAGE
FILLERS = make_prompts(4, seed=62, prompt_tokens=(4 * PAGE + 8, 5 * PAGE - 8))
CACHED_PAGES = 4
STORAGE_DEADLINE_S = 30.0


def hicache_prefill(storage: Path, pp: int) -> EngineSpec:
    return EngineSpec(
        f"hicache-pp{pp}",
        "prefill",
        MODELS.target,
        MODELS.draft_full,
        pp=pp,
        page_size=PAGE,
        chunked_prefill=CHUNK if pp > 1 else None,
        args={
            "max-total-tokens": DEVICE_TOKENS,
            **HICACHE,
        },
        env={STORAGE_DIR_ENV: str(storage)},
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["native-pp1", "native-pp2"])
def stages(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def storage(stages: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hicache")


@pytest.fixture(scope="module")
def engines(
    bed: Bed, storage: Path, stages: int, references: References
) -> Iterator[list[Engine]]:
    """Prefill and decode; the restart test replaces the first."""
    references.get("pages")
    decode = EngineSpec(
        "hicache-d", "decode", MODELS.target, MODELS.draft_full, page_size=PAGE
    )
    engines = bed.start([hicache_prefill(storage, stages), decode])
    yield engines
    bed.stop(*engines)


def tokens_by_tier(replies: list[Reply]) -> list[dict[str, int]]:
    return [
        {
            tier: reply.cached_details.get(tier, 0)
            for tier in ("device", "host", "storage")
        }
        for reply in replies
    ]


def only(tier: str, tokens: int = CACHED_PAGES * PAGE) -> list[dict[str, int]]:
    nothing = {"device": 0, "host": 0, "storage": 0}
    return [{**nothing, tier: tokens}] * 2


def wait_for_files(storage: Path, at_least: int) -> int:
    """Number of files once it has stopped growing and reached `at_least`."""
    deadline = time.monotonic() + STORAGE_DEADLINE_S
    seen = -1
    while time.monotonic() < deadline:
        count = sum(1 for path in storage.rglob("*") if path.is_file())
        if count >= at_least and count == seen:
            return count
        seen = count
        time.sleep(0.5)
    raise AssertionError(f"{seen} files in {storage}, expected at least {at_least}")


def test_cold_then_device(engines: list[Engine], references: References) -> None:
    client = Client.direct(*engines)
    cold = send(client, "pages", parallel=1)
    assert [reply.cached_tokens for reply in cold] == [0, 0]
    warm = send(client, "pages", parallel=1)
    assert tokens_by_tier(warm) == only("device")
    assert_parity(cold, "pages", references)
    assert_parity(warm, "pages", references)
    assert_both_paths_ran(warm)


def test_host(engines: list[Engine], references: References) -> None:
    client = Client.direct(*engines)
    send(client, "pages", parallel=1)
    client.generate([prompt.ids for prompt in FILLERS], 2, parallel=1)
    replies = send(client, "pages", parallel=1)
    assert tokens_by_tier(replies) == only("host")
    assert_parity(replies, "pages", references)


def test_storage_after_a_restart(
    bed: Bed,
    engines: list[Engine],
    storage: Path,
    stages: int,
    references: References,
) -> None:
    send(Client.direct(*engines), "pages", parallel=1)
    # A page is a file of each stage's target layers, and one of the draft.
    wait_for_files(storage, at_least=2 * CACHED_PAGES * (stages + 1))
    bed.stop(engines[0])
    (engines[0],) = bed.start([hicache_prefill(storage, stages)])
    replies = send(Client.direct(*engines), "pages", parallel=1)
    assert tokens_by_tier(replies) == only("storage")
    assert_parity(replies, "pages", references)


def test_both_engines_are_healthy_at_the_end(bed: Bed, engines: list[Engine]) -> None:
    assert unhealthy(*engines) == []
