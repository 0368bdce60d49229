"""DSPARK on a prefill with pipeline stages: the last stage writes and sends draft KV.

Claims are made against unified serving: same tokens and the same number of verify passes
for each request. The draft of the second half needs a key that came several hundred
tokens before, so a context that is not whole shows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pd_faults import abort_at_random
from pd_parity import (
    Pair,
    accept_length,
    assert_both_paths_ran,
    assert_moved,
    assert_parity,
    native_specs,
    verify_vector,
)
from pd_prompts import CHUNK, PROMPT_SETS, References, send

from dspark_pd.bed import MODELS, Bed, Client, Engine, EngineSpec, Reply
from dspark_pd.bed.prompts import make_recall_prompts

pytestmark = pytest.mark.e2e

PROBE = Path(__file__).parent / "draft_pool_probe"
RECALL = make_recall_prompts(6, seed=201)
# SGLang's own: every seventh step retracts, whether or not the pool is full.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


class TestNativePP:
    """Two stages of two ranks each; the decode of the one-stage pair serves them too."""

    @pytest.fixture(scope="class")
    @classmethod
    def prefill(cls, bed: Bed, native_pair: Pair) -> Iterator[Engine]:
        (engine,) = bed.start(native_specs("native-pp2", pp=2, tp=2)[:1])
        yield engine
        bed.stop(engine)

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls, prefill: Engine, native_pair: Pair) -> Client:
        return Client.direct(prefill, native_pair.decode)

    @pytest.mark.parametrize("name", ["short", "mixed", "chunked", "beyond"])
    def test_parity(self, client: Client, references: References, name: str) -> None:
        replies = send(client, name)
        assert_parity(replies, name, references)
        assert_both_paths_ran(replies)

    def test_one_request_at_a_time(
        self, client: Client, references: References
    ) -> None:
        """A batch of one has no neighbour that could lend it context."""
        assert_parity(send(client, "short", parallel=1), "short", references)

    def test_radix_hits(
        self, prefill: Engine, client: Client, references: References
    ) -> None:
        """Whole prompts, and one that begins like another."""
        prefill.flush_cache()
        cold = send(client, "radix", parallel=1)
        warm = send(client, "radix", parallel=1)
        assert [reply.cached_tokens for reply in cold] == [0, 0, 0]
        for reply in warm:
            assert reply.cached_tokens >= reply.prompt_tokens - 1
        assert_parity(warm, "radix", references)
        longer = PROMPT_SETS["sliding-radix"][-2:]
        begun, whole = (
            client.generate([prompt.ids], prompt.max_new_tokens)[0] for prompt in longer
        )
        assert begun.cached_tokens == 0
        assert whole.cached_tokens == len(longer[0].ids)
        plain = [references.get("sliding-radix", d) for d in (MODELS.draft_full, None)]
        assert [begun.output_ids, whole.output_ids] == [
            reply.output_ids for reply in plain[1][-2:]
        ]
        assert verify_vector([begun, whole]) == verify_vector(plain[0][-2:])

    def test_bytes_are_those_of_one_stage(
        self, prefill: Engine, client: Client
    ) -> None:
        prefill.flush_cache()
        before = prefill.bytes_posted()
        send(client, "mixed")
        assert_moved(prefill.bytes_posted() - before, "mixed")

    def test_aborts(
        self,
        prefill: Engine,
        client: Client,
        native_pair: Pair,
        references: References,
    ) -> None:
        abort_at_random(prefill, native_pair.decode, PROMPT_SETS["chunked"])
        for name in ("short", "mixed"):
            assert_parity(send(client, name), name, references)


@dataclass(frozen=True)
class Fleet:
    """A decode that shows its draft KV, prefills of two and of four stages."""

    decode: Engine
    pp2: Engine
    pp4: Engine
    unified: list[Reply]
    received: Path
    sent: Path


def ask(client: Client, **how: object) -> list[Reply]:
    return client.generate(
        [prompt.ids for prompt in RECALL],
        [prompt.max_new_tokens for prompt in RECALL],
        **how,
    )


def watched(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PROBE), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "DRAFT_POOL_PROBE_DIR": str(folder)}


def layer_hashes(folder: Path, prompt: list[int]) -> list[str]:
    """One hash for K and one for V of each draft layer of a prompt."""
    import torch

    name = hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:24]
    kv = torch.load(folder / f"{name}.pt")["kv"]
    return [hashlib.sha256(layer.numpy().tobytes()).hexdigest() for layer in kv]


class TestNativePPRecall:
    """A draft that needs the whole prompt; overlap is off on decode."""

    @pytest.fixture(scope="class")
    @classmethod
    def fleet(
        cls, bed: Bed, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Fleet]:
        target, draft = MODELS.recall_target, MODELS.recall_draft
        received, sent = (tmp_path_factory.mktemp(name) for name in ("got", "sent"))
        decode = EngineSpec(
            "recall-d",
            "decode",
            target,
            draft,
            overlap=False,
            env={**watched(received), **RETRACT},
        )
        prefills = [
            EngineSpec(
                f"recall-pp{pp}",
                "prefill",
                target,
                draft,
                pp=pp,
                chunked_prefill=CHUNK,
                env=watched(sent) if pp == 2 else {},
            )
            for pp in (2, 4)
        ]
        unified = EngineSpec("recall-unified", "unified", target, draft)
        first, *engines = bed.start([unified, decode, *prefills])
        answers = ask(Client.unified(first))
        bed.stop(first)
        yield Fleet(*engines, answers, received, sent)
        bed.stop(*engines)

    @pytest.mark.parametrize("stages", ["pp2", "pp4"])
    def test_parity(self, fleet: Fleet, stages: str) -> None:
        replies = ask(Client.direct(getattr(fleet, stages), fleet.decode), parallel=1)
        assert [r.output_ids for r in replies] == [r.output_ids for r in fleet.unified]
        assert verify_vector(replies) == verify_vector(fleet.unified)
        # Without the key it is 1.0; the last block of a request is cut.
        assert accept_length(replies) >= 2.5

    def test_draft_kv_arrives_as_it_was_sent(self, fleet: Fleet) -> None:
        ask(Client.direct(fleet.pp2, fleet.decode), parallel=1)
        for prompt in RECALL:
            sent = layer_hashes(fleet.sent, prompt.ids)
            assert len(set(sent)) == 2 * 2
            assert layer_hashes(fleet.received, prompt.ids) == sent

    def test_retraction(self, fleet: Fleet) -> None:
        """A retracted request resumes with the draft KV it had."""
        at = len(fleet.decode.log_text())
        replies = ask(Client.direct(fleet.pp2, fleet.decode), parallel=len(RECALL))
        found = re.findall(r"#retracted_reqs: (\d+)", fleet.decode.log_text()[at:])
        assert sum(map(int, found)) > 0
        assert [r.output_ids for r in replies] == [r.output_ids for r in fleet.unified]
        assert verify_vector(replies) == verify_vector(fleet.unified)


def test_engines_of_native_pp_are_healthy(bed: Bed, native_pair: Pair) -> None:
    bed.assert_healthy()
    assert "Traceback" not in native_pair.decode.log_text()
