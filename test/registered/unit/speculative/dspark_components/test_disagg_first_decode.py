"""After a prefill/decode handoff the first decode step has its draft input.

Pins the contract of ``disagg_first_decode``: what happens to an algorithm that rebuilds
nothing, and that the relay never answers for a batch that nobody relayed.
"""

from __future__ import annotations

import inspect
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.disaggregation import decode_schedule_batch_mixin
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.speculative.dspark_components import disagg_first_decode
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

DSPARK = SpeculativeAlgorithm.DSPARK
POOL_ROWS = 8
STALE_TOKEN = 999
CACHED = ("checkpoint_kv_cache", "maybe_cache_unfinished_req")
# DSPARK relays no hidden states; asking would need a published server config.
no_hidden_states = mock.patch(
    "sglang.srt.speculative.spec_utils.spec_need_hidden_states", return_value=False
)
# A relay entry may be pinned to a stream whatever the device; the CPU has none.
no_streams = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None)


def make_future_map(algorithm=DSPARK) -> FutureMap:
    pool = SimpleNamespace(
        size=POOL_ROWS - 1,
        req_to_token=torch.zeros((POOL_ROWS, 16), dtype=torch.int32),
    )
    return FutureMap(torch.device("cpu"), algorithm, pool)


class PrebuiltBatch(decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin):
    """The fields of a batch that ``process_prebuilt`` touches."""

    def __init__(self, algorithm, tokens, rows, seq_lens, overlap):
        self.spec_algorithm = algorithm
        self.enable_overlap = overlap
        self.device = "cpu"
        self.tree_cache = mock.MagicMock()
        self.req_pool_indices = torch.tensor(rows, dtype=torch.int64)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int64)
        common = {"grammar": None, "swa_branching_seqlen": None}
        self.reqs = [SimpleNamespace(output_ids=[token], **common) for token in tokens]
        self.spec_info = self.input_ids = None

    def batch_size(self):
        return len(self.reqs)


def hand_off(algorithm=DSPARK, overlap=True, tokens=(41, 42), future_map=None):
    """Run the real prebuilt path for two requests and return (batch, future_map)."""
    future_map = future_map or make_future_map()
    batch = PrebuiltBatch(algorithm, tokens, [5, 2], [30, 7], overlap)
    known = {"future_map": future_map, "server_args": SimpleNamespace()}
    taken = inspect.signature(batch.process_prebuilt).parameters
    cached = dict.fromkeys(CACHED, mock.DEFAULT)
    with mock.patch.multiple(decode_schedule_batch_mixin, create=True, **cached):
        batch.process_prebuilt(**{name: known[name] for name in taken})
    return batch, future_map


class HandoffTestCase(CustomTestCase):
    def setUp(self):
        for patch in (no_hidden_states, no_streams):
            patch.start()
            self.addCleanup(patch.stop)


def make_input(tokens, indices=None):
    draft_input = make_next_draft_input(
        bonus_tokens=torch.tensor(tokens, dtype=torch.int64),
        new_seq_lens=torch.arange(1, len(tokens) + 1),
    )
    if indices is not None:
        draft_input.future_indices = torch.tensor(indices, dtype=torch.int64)
    return draft_input


class TestFirstDecodeContract(HandoffTestCase):
    def test_handed_off_requests_survive_filter_and_merge(self):
        running, future_map = hand_off(overlap=True)
        running.spec_info.filter_batch(torch.tensor([1]), [1])
        arrived = make_input([77])
        newcomer = PrebuiltBatch(DSPARK, [77], rows=[6], seq_lens=[9], overlap=True)
        disagg_first_decode.enter_first_decode(newcomer, arrived, future_map)
        running.spec_info.merge_batch(arrived)
        self.assertEqual(running.spec_info.future_indices.tolist(), [2, 6])
        running.reqs = [running.reqs[1], newcomer.reqs[0]]
        future_map._resolve_spec_extras(running)
        self.assertEqual(running.spec_info.bonus_tokens.tolist(), [42, 77])

    def test_missing_input_is_refused(self):
        """An algorithm that rebuilds nothing is named here, not one step later."""
        with mock.patch.object(
            SpeculativeAlgorithm, "build_disagg_draft_input", return_value=None
        ):
            with self.assertRaisesRegex(
                RuntimeError, "DSPARK built no draft input for 2 request"
            ):
                hand_off()

    def test_unrelayed_input_is_relayed_under_overlap(self):
        """A builder that forgets the relay must not lose its token in a merge."""
        future_map = make_future_map()
        forgetful = make_input([41, 42])
        with mock.patch.object(
            SpeculativeAlgorithm, "build_disagg_draft_input", return_value=forgetful
        ):
            batch, _ = hand_off(future_map=future_map)
        self.assertEqual(batch.spec_info.future_indices.tolist(), [5, 2])
        self.assertEqual(future_map.output_tokens_buf[[5, 2]].tolist(), [41, 42])

    def test_plain_decode_is_left_alone(self):
        none = SpeculativeAlgorithm.NONE
        batch, future_map = hand_off(none, future_map=make_future_map(none))
        self.assertIsNone(batch.spec_info)
        self.assertEqual(future_map.output_tokens_buf[[5, 2]].tolist(), [41, 42])


def make_used_future_map() -> FutureMap:
    """A relay in which every entry has an earlier owner's token."""
    future_map = make_future_map()
    earlier = make_input([STALE_TOKEN] * POOL_ROWS)
    future_map.stash(torch.arange(POOL_ROWS), RelayPayload.from_draft_input(earlier))
    return future_map


class TestFutureMapWithoutRelay(HandoffTestCase):
    def setUp(self):
        super().setUp()
        self.future_map = make_used_future_map()

    def resolve(self, draft_input, num_reqs):
        reqs = [SimpleNamespace(rid=f"rid-{i}") for i in range(num_reqs)]
        batch = SimpleNamespace(
            spec_info=draft_input, reqs=reqs, batch_size=lambda: num_reqs
        )
        self.future_map._resolve_spec_extras(batch)
        return draft_input

    def test_complete_input_is_kept(self):
        """The first decode after a handoff must start from prefill's own token."""
        draft_input = self.resolve(make_input([11, 12]), num_reqs=2)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [11, 12])
        self.assertIsNone(draft_input.future_indices)

    def test_empty_batch_is_kept(self):
        """An idle rank relays nothing and must not read an entry either."""
        draft_input = self.resolve(make_input([]), num_reqs=0)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [])

    def test_lost_entries_are_an_error(self):
        """A token missing for one request must not come from the entry's last owner."""
        for draft_input in (make_input([11]), make_input([11, 12])):
            draft_input.new_seq_lens = draft_input.new_seq_lens[:1]
            with self.assertRaisesRegex(RuntimeError, "Lost relay entries of 2.*rid-0"):
                self.resolve(draft_input, num_reqs=2)
        draft_input.bonus_tokens = None
        with self.assertRaisesRegex(RuntimeError, "future_indices is None"):
            self.resolve(draft_input, num_reqs=2)

    def test_relayed_input_is_still_read_from_its_entries(self):
        """The guard must not switch the relay off for a batch that uses it."""
        indices = torch.tensor([3, 1])
        fresh = make_input([31, 32], indices=[3, 1])
        self.future_map.stash(indices, RelayPayload.from_draft_input(fresh))
        draft_input = self.resolve(make_input([0, 0], indices=[3, 1]), num_reqs=2)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [31, 32])


if __name__ == "__main__":
    unittest.main()
