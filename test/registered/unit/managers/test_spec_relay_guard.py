"""The overlap relay never answers for a batch that nobody relayed.

``FutureMap`` keeps the next draft input of every running request in rows that
are reused by later requests. These tests use the real class on the CPU and pin
what it does for an input without rows (``future_indices`` None).
"""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

POOL_ROWS = 8
STALE_TOKEN = 999
# DSPARK relays no hidden states; asking would need a published server config.
no_hidden_states = mock.patch(
    "sglang.srt.speculative.spec_utils.spec_need_hidden_states", return_value=False
)
# Older releases pin relay rows to a stream whatever the device; the CPU has none.
no_streams = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None)


def make_future_map() -> FutureMap:
    pool = SimpleNamespace(
        size=POOL_ROWS - 1,
        req_to_token=torch.zeros((POOL_ROWS, 16), dtype=torch.int32),
    )
    future_map = FutureMap(torch.device("cpu"), SpeculativeAlgorithm.DSPARK, pool)
    every_row = torch.arange(POOL_ROWS)
    earlier = make_next_draft_input(
        bonus_tokens=torch.full((POOL_ROWS,), STALE_TOKEN),
        new_seq_lens=torch.full((POOL_ROWS,), 5),
    )
    future_map.stash(every_row, RelayPayload.from_draft_input(earlier))
    return future_map


def make_input(tokens, rows=None):
    draft_input = make_next_draft_input(
        bonus_tokens=torch.tensor(tokens, dtype=torch.int64),
        new_seq_lens=torch.arange(1, len(tokens) + 1),
    )
    if rows is not None:
        draft_input.future_indices = torch.tensor(rows, dtype=torch.int64)
    return draft_input


def make_batch(draft_input, num_reqs):
    return SimpleNamespace(
        spec_info=draft_input,
        reqs=[SimpleNamespace(rid=f"rid-{i}") for i in range(num_reqs)],
        batch_size=lambda: num_reqs,
    )


class TestFutureMapWithoutRelay(CustomTestCase):
    def setUp(self):
        for patch in (no_hidden_states, no_streams):
            patch.start()
            self.addCleanup(patch.stop)
        self.future_map = make_future_map()

    def resolve(self, draft_input, num_reqs):
        self.future_map._resolve_spec_extras(make_batch(draft_input, num_reqs))
        return draft_input

    def test_complete_input_is_kept(self):
        """The first decode after a handoff must start from prefill's own token."""
        draft_input = self.resolve(make_input([11, 12]), num_reqs=2)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [11, 12])
        self.assertIsNone(draft_input.future_indices)

    def test_empty_batch_is_kept(self):
        """An idle rank relays nothing and must not read a row either."""
        draft_input = self.resolve(make_input([]), num_reqs=0)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [])

    def test_lost_rows_are_an_error(self):
        """A token missing for one request must not come from the row's last owner."""
        for draft_input in (make_input([11]), make_input([11, 12])):
            draft_input.new_seq_lens = draft_input.new_seq_lens[:1]
            with self.assertRaisesRegex(RuntimeError, "Lost relay rows of 2.*rid-0"):
                self.resolve(draft_input, num_reqs=2)

    def test_missing_token_column_is_an_error(self):
        draft_input = make_input([11])
        draft_input.bonus_tokens = None
        with self.assertRaisesRegex(RuntimeError, "future_indices is None"):
            self.resolve(draft_input, num_reqs=1)

    def test_relayed_input_is_still_read_from_its_rows(self):
        """The guard must not switch the relay off for a batch that uses it."""
        rows = torch.tensor([3, 1])
        fresh = make_input([31, 32], rows=[3, 1])
        self.future_map.stash(rows, RelayPayload.from_draft_input(fresh))
        draft_input = self.resolve(make_input([0, 0], rows=[3, 1]), num_reqs=2)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [31, 32])


class TestMergeKeepsTheRelay(CustomTestCase):
    def test_relayed_sides_are_joined(self):
        kept, merged = make_input([1, 2], rows=[4, 5]), make_input([3], rows=[6])
        kept.merge_batch(merged)
        self.assertEqual(kept.future_indices.tolist(), [4, 5, 6])

    def test_unrelayed_sides_are_joined(self):
        kept, merged = make_input([1, 2]), make_input([3])
        kept.merge_batch(merged)
        self.assertEqual(kept.bonus_tokens.tolist(), [1, 2, 3])
        self.assertIsNone(kept.future_indices)

    def test_filter_keeps_the_rows_of_the_survivors(self):
        draft_input = make_input([1, 2, 3], rows=[4, 5, 6])
        draft_input.filter_batch(torch.tensor([0, 2]), [0, 2])
        self.assertEqual(draft_input.future_indices.tolist(), [4, 6])

    def test_filter_keeps_an_unrelayed_input(self):
        draft_input = make_input([1, 2, 3])
        draft_input.filter_batch(torch.tensor([2]), [2])
        self.assertEqual(draft_input.bonus_tokens.tolist(), [3])
        self.assertIsNone(draft_input.future_indices)

    def test_half_relayed_merge_is_refused(self):
        """Joining a stale token column with a fresh one feeds the target garbage."""
        for rows in ((None, [6]), ([4], None)):
            kept, merged = (make_input([1], rows=r) for r in rows)
            with self.assertRaisesRegex(RuntimeError, "has rows in the overlap relay"):
                kept.merge_batch(merged)

    def test_empty_side_may_be_merged_into_an_unrelayed_one(self):
        kept = make_input([1])
        kept.merge_batch(make_input([], rows=[]))
        self.assertEqual(kept.bonus_tokens.tolist(), [1])


if __name__ == "__main__":
    unittest.main()
