"""A prefill without a draft hands over hidden states; DSPARK decodes from them.

Claims are made against unified serving with the same draft: same tokens, the same
number of verify passes for each request, and draft KV equal to what a prefill with a
draft would have sent. The full-attention draft is the negative control: a tail cannot
cover it, and it shows.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import random_models
from pd_faults import abort_at_random
from pd_fuzz import PROMPTS, assert_alive_and_empty, sampling, send_all
from pd_parity import (
    assert_both_paths_ran,
    assert_parity,
    assert_same_output,
    largest_batch,
    verify_vector,
)
from pd_prompts import CHUNK, PROMPT_SETS, References, send
from pd_tail import (
    CAPTURE,
    SETS,
    assert_moved,
    captured_layers,
    decode_spec,
    prefill_spec,
    window,
)

from dspark_pd.bed import (
    MODELS,
    Bed,
    BedError,
    Client,
    Engine,
    EngineSpec,
    Reply,
    RouterSpec,
)
from dspark_pd.bed.prompts import make_prompts

pytestmark = pytest.mark.e2e

LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
PROBE = Path(__file__).parent / "draft_pool_probe"


@dataclass(frozen=True)
class Fleet:
    """One decode and the prefills that hand over to it."""

    decode: Engine
    pp1: Engine
    pp2: Engine
    native: Engine
    probe: Path

    def client(self, prefill: str) -> Client:
        return Client.direct(getattr(self, prefill), self.decode)


def watched(probe: Path) -> dict[str, str]:
    """Environment of a decode that shows its draft KV."""
    path = os.pathsep.join(filter(None, [str(PROBE), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "DRAFT_POOL_PROBE_DIR": str(probe)}


@pytest.fixture(scope="class")
def fleet(
    bed: Bed, references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    references.get(SETS[0], MODELS.draft_swa)
    probe = tmp_path_factory.mktemp("probe")
    engines = bed.start(
        [
            decode_spec(
                "tail-d",
                env=watched(probe),
                # One test reads batch sizes from the log.
                args={"decode-log-interval": 1},
            ),
            prefill_spec("tail-pp1"),
            prefill_spec("tail-pp2", pp=2, env={LAYER_IDS: layer_list()}),
            EngineSpec(
                "tail-native",
                "prefill",
                MODELS.target,
                MODELS.draft_swa,
                chunked_prefill=CHUNK,
            ),
        ]
    )
    yield Fleet(*engines, probe)
    bed.stop(*engines)


def probed(probe: Path, prompt: Sequence[int]) -> dict:
    import torch

    digest = hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:24]
    return torch.load(probe / f"{digest}.pt")


def assert_same_draft_kv(mine: Any, theirs: Any) -> None:
    """Equal but for the order in which float32 GEMMs of other row counts add up."""
    assert theirs.abs().max() > 0
    assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def layer_list(draft: Path = MODELS.draft_swa) -> str:
    return ",".join(map(str, captured_layers(draft)))


@pytest.fixture(scope="class")
def paged_client(bed: Bed) -> Iterator[Client]:
    """PP 2 to attention DP 2, pages of 16, decode radix cache, no overlap on decode."""
    args = {"disaggregation-decode-enable-radix-cache": True}
    engines = bed.start(
        [
            prefill_spec("tail-p16", pp=2, page_size=16),
            decode_spec(
                "tail-d16", tp=2, attention_dp=2, page_size=16, overlap=False, args=args
            ),
        ]
    )
    yield Client.direct(*engines)
    bed.stop(*engines)


@pytest.fixture(scope="class")
def wide_pair(bed: Bed) -> Iterator[list[Engine]]:
    """TP 2 on both engines, pages of 64, and a decode pool that forces retraction.

    Prefill starts before decode has reserved a slot, and is made to throw away every
    second first attempt, whose tokens are then in its cache.
    """
    args = {"max-total-tokens": 640, "num-reserved-decode-tokens": 8}
    retried = {**CAPTURE, "SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}
    early = {"optimistic-prefill-attempts": 2}
    engines = bed.start(
        [
            prefill_spec("tail-tp2", tp=2, page_size=64, env=retried, args=early),
            decode_spec("tail-d64", tp=2, page_size=64, args=args),
        ]
    )
    yield engines
    bed.stop(*engines)


PARTIAL = {"SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT": "1"}


@pytest.fixture(scope="class")
def partial_client(bed: Bed) -> Iterator[Client]:
    """A full-attention draft with a tail of eight tokens, allowed explicitly."""
    # Prefill knows no draft: eight tokens are its default, and decode has to consent.
    capture = {LAYER_IDS: layer_list(MODELS.draft_full)}
    prefill = EngineSpec("tail-partial-p", "prefill", MODELS.target, env=capture)
    decode = decode_spec("tail-partial-d", draft=MODELS.draft_full, env=PARTIAL)
    engines = bed.start([prefill, decode])
    yield Client.direct(*engines)
    bed.stop(*engines)


def refused(bed: Bed, spec: EngineSpec) -> str:
    with pytest.raises(BedError) as caught:
        bed.start([spec])
    error = caught.value
    return f"{error}\n{getattr(error, 'log_tail', '')}"


class TestTailFleet:
    """One decode; prefills with one stage, with two, and with a draft."""

    @pytest.mark.parametrize("name", SETS)
    @pytest.mark.parametrize("prefill", ["pp1", "pp2"])
    def test_tail_parity(
        self, fleet: Fleet, references: References, prefill: str, name: str
    ) -> None:
        replies = send(fleet.client(prefill), name)
        assert_parity(replies, name, references, MODELS.draft_swa)
        if name == "sliding":
            assert_both_paths_ran(replies)

    def test_tail_prompts_are_what_they_claim(self, fleet: Fleet) -> None:
        """Shorter than the tail, longer than it, and many chunks long."""
        lengths = {name: [len(p.ids) for p in PROMPT_SETS[name]] for name in SETS}
        assert max(lengths["sliding-short"]) < window()
        assert min(lengths["sliding"]) < window() < max(lengths["sliding"])
        assert min(lengths["sliding-long"]) > 3 * CHUNK

    @pytest.mark.parametrize("prefill", ["pp1", "pp2"])
    def test_tail_draws_what_native_draws(
        self, fleet: Fleet, references: References, prefill: str
    ) -> None:
        """Sampled with a seed: the same tokens and verify passes."""
        how = {"temperature": 2.0, "sampling_seed": 5}
        tail = send(fleet.client(prefill), "sliding", **how)
        native = send(fleet.client("native"), "sliding", **how)
        greedy = references.get("sliding", MODELS.draft_swa)
        assert [r.output_ids for r in tail] != [r.output_ids for r in greedy]
        assert [r.output_ids for r in tail] == [r.output_ids for r in native]
        assert verify_vector(tail) == verify_vector(native)

    @pytest.mark.parametrize("prefill", ["pp1", "pp2"])
    def test_tail_draft_kv_equals_native(self, fleet: Fleet, prefill: str) -> None:
        """What injection wrote is what a prefill with a draft would have sent."""
        for name in SETS:
            for prompt in PROMPT_SETS[name]:
                dumps = {}
                for source in ("native", prefill):
                    fleet.client(source).generate([prompt.ids], 1)
                    dumps[source] = probed(fleet.probe, prompt.ids)
                kept = min(len(prompt.ids), window())
                native, tail = (dumps[s]["kv"][:, -kept:] for s in ("native", prefill))
                assert dumps[prefill]["end"] == len(prompt.ids)
                assert_same_draft_kv(tail, native)

    def test_tail_and_native_share_a_decode(
        self, fleet: Fleet, references: References
    ) -> None:
        """The tail of one prefill is never written over the draft KV of another."""
        answers: dict[str, list[Reply]] = {}

        def run(prefill: str) -> None:
            answers[prefill] = send(fleet.client(prefill), "sliding")

        threads = [threading.Thread(target=run, args=(p,)) for p in ("native", "pp2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for replies in answers.values():
            assert_parity(replies, "sliding", references, MODELS.draft_swa)
        assert len(answers) == 2

    def test_tail_requests_really_were_batched(
        self, fleet: Fleet, references: References
    ) -> None:
        replies = send(fleet.client("pp2"), "sliding-beyond")
        assert_parity(replies, "sliding-beyond", references, MODELS.draft_swa)
        assert largest_batch(fleet.decode) >= 3

    @pytest.mark.parametrize("prefill", ["pp1", "pp2"])
    def test_tail_prefill_radix(
        self, fleet: Fleet, references: References, prefill: str
    ) -> None:
        """A cached prompt is matched up to its tail, which is computed again."""
        getattr(fleet, prefill).flush_cache()
        cold = send(fleet.client(prefill), "sliding-radix", parallel=1)
        warm = send(fleet.client(prefill), "sliding-radix", parallel=1)
        for reply in warm:
            assert reply.cached_tokens == reply.prompt_tokens - window()
        # The last prompt continues the one before it: a partial hit in the first pass.
        assert 0 < cold[-1].cached_tokens < cold[-1].prompt_tokens - window()
        for replies in (cold, warm):
            assert_parity(replies, "sliding-radix", references, MODELS.draft_swa)

    @pytest.mark.parametrize("prefill", ["pp1", "pp2"])
    def test_tail_moves_the_hidden_states_that_exist(
        self, fleet: Fleet, prefill: str
    ) -> None:
        engine, stages = getattr(fleet, prefill), {"pp1": 1, "pp2": 2}[prefill]
        for name in ("sliding", "sliding-short"):
            before = engine.bytes_posted()
            send(fleet.client(prefill), name)
            assert_moved(engine.bytes_posted() - before, name, stages)

    def test_tail_through_the_router(
        self, bed: Bed, fleet: Fleet, references: References
    ) -> None:
        spec = RouterSpec(
            "tail-router",
            [fleet.pp1.endpoint, fleet.pp2.endpoint],
            [fleet.decode.endpoint],
        )
        router = bed.start_router(spec)
        try:
            replies = send(Client.router(router), "sliding")
            assert_parity(replies, "sliding", references, MODELS.draft_swa)
        finally:
            bed.stop(router)

    @pytest.mark.parametrize("prefill", ["pp1", "pp2"])
    def test_tail_survives_aborts(
        self, fleet: Fleet, references: References, prefill: str
    ) -> None:
        """Aborted on either engine at any stage; slots and hidden states stay the others' own."""
        prompts = PROMPT_SETS["sliding-long"]
        abort_at_random(getattr(fleet, prefill), fleet.decode, prompts)
        for name in SETS:
            replies = send(fleet.client(prefill), name)
            assert_parity(replies, name, references, MODELS.draft_swa)

    def test_tail_no_prompt_ends_a_stage(self, fleet: Fleet) -> None:
        engines = (fleet.pp2, fleet.decode)
        said = send_all(engines, {**PROMPTS, "n": sampling(n=2)}, limit_s=2.0)
        assert_alive_and_empty(*engines, said=said)
        assert said["prompt text=''"] == [400, 400]
        assert said["a batch"] == said["n"] == [200, 200]

    def test_tail_engines_are_healthy(self, bed: Bed, fleet: Fleet) -> None:
        bed.assert_healthy()
        for engine in (fleet.decode, fleet.pp1, fleet.pp2, fleet.native):
            assert "Traceback" not in engine.log_text()
        assert "were not captured" not in fleet.pp1.log_text() + fleet.pp2.log_text()


@pytest.fixture(scope="class")
def proof_of_concept(bed: Bed, tmp_path_factory: pytest.TempPathFactory):
    """The two commands of the proof of concept, with the draft in the target's checkpoint.

    Room for one request at a time on prefill: all others have to wait for it.
    """
    model = tmp_path_factory.mktemp("model")
    for file in MODELS.target.iterdir():
        (model / file.name).symlink_to(file)
    (model / "dspark").symlink_to(MODELS.draft_swa)
    ids = {LAYER_IDS: layer_list()}
    alone = {"disable-radix-cache": True, "max-running-requests": 2}
    engines = bed.start(
        [
            EngineSpec("poc-p", "prefill", model, pp=2, args=alone, env=ids),
            EngineSpec(
                "poc-d", "decode", model, args={"speculative-algo": "DSPARK"}, env=ids
            ),
        ]
    )
    yield engines
    bed.stop(*engines)


class TestProofOfConcept:
    """What its page tells users to start."""

    @pytest.mark.parametrize("name", SETS)
    def test_both_commands_run_as_written(
        self, proof_of_concept: list[Engine], references: References, name: str
    ) -> None:
        replies = send(Client.direct(*proof_of_concept), name)
        assert_parity(replies, name, references, MODELS.draft_swa)

    def test_requests_without_room_wait(
        self, proof_of_concept: list[Engine], references: References
    ) -> None:
        """Far more at once than prefill has rows for: none is refused."""
        client = Client.direct(*proof_of_concept)
        replies = send(client, "sliding-beyond", parallel=16)
        assert_parity(replies, "sliding-beyond", references, MODELS.draft_swa)
        assert "were not captured" not in proof_of_concept[0].log_text()

    def test_what_is_printed(self, proof_of_concept: list[Engine]) -> None:
        """Each engine says what it hands over, or how much memory that takes."""
        prefill, decode = (engine.log_text() for engine in proof_of_concept)
        assert "of the last 31 tokens" in prefill
        for log in (prefill, decode):
            assert re.search(r"requests of .* MiB are .* MiB for all ranks", log)


class TestTailPages:
    """Stages to ranks, pages, a prefix cache on decode and no overlap there."""

    @pytest.mark.parametrize("name", [*SETS, "sliding-radix"])
    def test_tail_pages_and_decode_radix(
        self, paged_client: Client, references: References, name: str
    ) -> None:
        for _ in range(2):
            replies = send(paged_client, name)
            assert_parity(replies, name, references, MODELS.draft_swa)
        if name == "sliding-radix":
            assert all(reply.cached_tokens for reply in replies)


class TestTailWide:
    """Tensor parallel engines, retried prefills and a pool that is too small."""

    @pytest.mark.parametrize("name", SETS)
    def test_tail_tp2(
        self, wide_pair: list[Engine], references: References, name: str
    ) -> None:
        replies = send(Client.direct(*wide_pair), name)
        assert_parity(replies, name, references, MODELS.draft_swa)

    def test_tail_survives_retraction(
        self, wide_pair: list[Engine], references: References
    ) -> None:
        """A retracted request resumes with the draft KV it had."""
        name = "sliding-beyond"
        decode = wide_pair[1]
        at = len(decode.log_text())
        replies = send(Client.direct(*wide_pair), name, parallel=16)
        retracted = re.findall(r"#retracted_reqs: (\d+)", decode.log_text()[at:])
        assert sum(map(int, retracted)) > 0
        assert_parity(replies, name, references, MODELS.draft_swa)


class TestTailPartial:
    """A draft that the tail cannot cover."""

    def test_tail_of_a_full_attention_draft_shows(
        self, partial_client: Client, references: References
    ) -> None:
        """The negative control: same text, more verify passes, and always the same."""
        first = send(partial_client, "short")
        assert_same_output(first, "short", references)
        assert sum(verify_vector(first)) > sum(verify_vector(references.get("short")))
        for name in ("mixed", "chunked"):
            assert_same_output(send(partial_client, name), name, references)
        alone = send(partial_client, "short", parallel=1)
        assert verify_vector(alone) == verify_vector(first)


@pytest.mark.parametrize("family", sorted(random_models.TARGETS))
def test_tail_and_native_pp_of_other_targets(
    bed: Bed, tmp_path: Path, family: str
) -> None:
    """Pipelined capture in code that models share: draft KV equals a native prefill's."""
    target, draft = random_models.make_pair(tmp_path, family)
    probe = tmp_path / "probe"
    probe.mkdir()
    plain = random_models.NO_TOKENIZER
    config = {**plain, "speculative-draft-model-path": str(draft)}
    engines = bed.start(
        [
            EngineSpec(
                f"{family}-d", "decode", target, draft, args=plain, env=watched(probe)
            ),
            EngineSpec(f"{family}-native", "prefill", target, draft, args=plain),
            EngineSpec(
                f"{family}-pp2", "prefill", target, pp=2, args=config, env=CAPTURE
            ),
            EngineSpec(
                f"{family}-native-pp2", "prefill", target, draft, pp=2, args=plain
            ),
        ]
    )
    decode, *prefills = engines
    prompts = [prompt.ids for prompt in make_prompts(4, seed=1)]
    answers, draft_kv = [], []
    for prefill in prefills:
        client = Client.direct(prefill, decode)
        answers.append([r.output_ids for r in client.generate(prompts, 16)])
        draft_kv.append([probed(probe, prompt)["kv"] for prompt in prompts])
    bed.stop(*engines)
    assert answers[0] == answers[1] == answers[2]
    kept = random_models.WINDOW - 1
    for native, tail, staged in zip(*draft_kv, strict=True):
        assert_same_draft_kv(tail[:, -kept:], native[:, -kept:])
        assert_same_draft_kv(staged, native)


def test_tail_refusals_at_start(bed: Bed) -> None:
    """The message must reach whoever starts the engine."""
    others = decode_spec("tail-bad-d", env={LAYER_IDS: "0,1"})
    assert f"{LAYER_IDS}=0,1 on decode, but its draft reads" in refused(bed, others)
    misplaced = EngineSpec("tail-bad-u", "unified", MODELS.target, env=CAPTURE)
    assert "only a prefill engine has hidden states to hand over" in refused(
        bed, misplaced
    )
