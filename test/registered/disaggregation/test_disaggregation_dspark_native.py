"""DSPARK on prefill and decode, draft KV moved by NIXL, through the router.

Every claim is made against unified serving: same tokens, and the same number of
verify passes for each request.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pd_parity import (
    Pair,
    accept_length,
    assert_both_paths_ran,
    assert_parity,
    assert_same_output,
    largest_batch,
    native_specs,
    route,
    verify_vector,
)
from pd_prompts import CHUNK, PROMPT_SETS, References, send

from dspark_pd.bed import MODELS, Bed, Client, EngineSpec

pytestmark = pytest.mark.e2e


def test_the_trained_draft_can_tell(references: References) -> None:
    """Without this, equal verify counts would show nothing."""
    assert accept_length(references.get("short")) >= 3.5


@pytest.mark.parametrize("name", ["short", "mixed", "chunked", "beyond"])
def test_parity_with_unified(
    native_pair: Pair, references: References, name: str
) -> None:
    before = native_pair.prefill.bytes_posted()
    replies = send(native_pair.client, name)
    assert_parity(replies, name, references)
    assert_both_paths_ran(replies)
    assert native_pair.prefill.bytes_posted() > before
    assert native_pair.decode.bytes_posted() == 0


def test_one_request_at_a_time(native_pair: Pair, references: References) -> None:
    """A batch of one has no neighbour that could lend it context."""
    assert_parity(send(native_pair.client, "short", parallel=1), "short", references)


def test_prompts_really_were_chunked(native_pair: Pair) -> None:
    prompt = PROMPT_SETS["chunked"][0].ids
    assert len(prompt) > 3 * CHUNK
    native_pair.prefill.flush_cache()
    at = len(native_pair.prefill.log_text())
    native_pair.client.generate([prompt], 2)
    lines = native_pair.prefill.log_text()[at:].splitlines()
    chunks = [line for line in lines if f"#new-token: {CHUNK}," in line]
    assert len(chunks) >= 3


def test_requests_really_were_batched(native_pair: Pair) -> None:
    prompts = [prompt.ids for prompt in PROMPT_SETS["beyond"]] * 2
    native_pair.client.generate(prompts, 120)
    assert largest_batch(native_pair.decode) >= 3


def test_prefill_radix_hit(native_pair: Pair, references: References) -> None:
    """A second pass finds its prompt on prefill, with the draft's KV beside it."""
    native_pair.prefill.flush_cache()
    cold = send(native_pair.client, "radix")
    assert [reply.cached_tokens for reply in cold] == [0, 0, 0]
    warm = send(native_pair.client, "radix")
    for reply in warm:
        assert reply.cached_tokens >= reply.prompt_tokens - 1
        assert reply.cached_details["device"] == reply.cached_tokens
    assert_parity(cold, "radix", references)
    assert_parity(warm, "radix", references)


def test_pair_without_a_router(native_pair: Pair, references: References) -> None:
    assert_parity(send(native_pair.direct, "short"), "short", references)


@pytest.mark.parametrize("stream", [True, False])
def test_chat_completions(
    native_pair: Pair, references: References, stream: bool
) -> None:
    for prompt, reference in zip(
        PROMPT_SETS["chat"], references.get("chat", None), strict=True
    ):
        reply = native_pair.client.chat(
            [{"role": "user", "content": prompt.text}],
            max_tokens=prompt.max_new_tokens,
            stream=stream,
            ignore_eos=True,
        )
        assert reply.text == bytes(reference.output_ids).decode()
        assert reply.finish_reason == "length"
        assert len(reply.pieces) > 1 or not stream


class TestWithoutContext:
    """The negative control: same text, but the verify passes give it away."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, bed: Bed, native_pair: Pair) -> Iterator[Pair]:
        (prefill,) = bed.start([EngineSpec("cold-p", "prefill", MODELS.target)])
        pair = route(bed, prefill, native_pair.decode)
        yield pair
        bed.stop(prefill, pair.router)

    def test_missing_context_shows(self, pair: Pair, references: References) -> None:
        replies = send(pair.client, "short")
        assert_same_output(replies, "short", references)
        assert verify_vector(replies) != verify_vector(references.get("short"))
        assert accept_length(replies) <= 1.6


class TestWithoutOverlap:
    """The scheduler without overlap hands over in another place."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, bed: Bed, native_pair: Pair) -> Iterator[Pair]:
        pair = route(bed, *bed.start(native_specs("no-overlap", overlap=False)))
        yield pair
        bed.stop(pair.prefill, pair.decode, pair.router)

    @pytest.mark.parametrize("name", ["short", "mixed", "chunked", "beyond"])
    def test_parity(self, pair: Pair, references: References, name: str) -> None:
        replies = send(pair.client, name)
        assert_parity(replies, name, references)
        assert_both_paths_ran(replies)

    def test_the_setting_took_effect(self, pair: Pair, native_pair: Pair) -> None:
        for engine in (pair.prefill, pair.decode):
            assert engine.info()["disable_overlap_schedule"] is True
        for engine in (native_pair.prefill, native_pair.decode):
            assert engine.info()["disable_overlap_schedule"] is False


class TestTensorParallel:
    """Two ranks on both sides, and on one side only."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, bed: Bed, native_pair: Pair) -> Iterator[Pair]:
        pair = route(bed, *bed.start(native_specs("tp2", tp=2)))
        yield pair
        bed.stop(pair.prefill, pair.decode, pair.router)

    @pytest.mark.parametrize("name", ["short", "mixed", "chunked"])
    def test_parity(self, pair: Pair, references: References, name: str) -> None:
        before = pair.prefill.bytes_posted()
        replies = send(pair.client, name)
        assert_parity(replies, name, references)
        assert pair.prefill.bytes_posted() > before

    @pytest.mark.parametrize("wide", ["prefill", "decode"])
    def test_parity_with_unequal_tp(
        self, pair: Pair, native_pair: Pair, references: References, wide: str
    ) -> None:
        prefill = (pair if wide == "prefill" else native_pair).prefill
        decode = (pair if wide == "decode" else native_pair).decode
        replies = send(Client.direct(prefill, decode), "short")
        assert_parity(replies, "short", references)


class TestAttentionDataParallel:
    """Two groups of one rank: each computes attention for its own requests only.

    A step of one group has dummy rows in the other, so handoffs meet both.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, bed: Bed, native_pair: Pair) -> Iterator[Pair]:
        specs = native_specs("attn-dp", tp=2, attention_dp=2)
        pair = route(bed, *bed.start(specs))
        yield pair
        bed.stop(pair.prefill, pair.decode, pair.router)

    def test_parity(self, pair: Pair, references: References) -> None:
        groups: set[int] = set()  # chosen by the room, which is random
        for name in ("short", "mixed", "chunked"):
            before = pair.prefill.bytes_posted()
            replies = send(pair.client, name)
            assert_parity(replies, name, references)
            assert pair.prefill.bytes_posted() > before
            groups |= {reply.meta["dp_rank"] for reply in replies}
        assert groups == {0, 1}

    def test_the_description_has_the_size_of_a_group(self, pair: Pair) -> None:
        for engine in (pair.prefill, pair.decode):
            states = engine.info()["internal_states"]
            assert [state["peer_description"]["tp"] for state in states] == [1, 1]

    @pytest.mark.parametrize("split", ["prefill", "decode"])
    def test_parity_with_a_peer_of_one_rank(
        self, pair: Pair, native_pair: Pair, references: References, split: str
    ) -> None:
        prefill = (pair if split == "prefill" else native_pair).prefill
        decode = (pair if split == "decode" else native_pair).decode
        replies = send(Client.direct(prefill, decode), "short")
        assert_parity(replies, "short", references)


def test_every_process_is_healthy_at_the_end(bed: Bed, native_pair: Pair) -> None:
    bed.assert_healthy()
    assert native_pair.router.alive()
