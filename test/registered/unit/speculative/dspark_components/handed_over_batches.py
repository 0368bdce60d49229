"""Batches that were handed over, made by SGLang's own prebuilt path without an engine."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.disaggregation import decode_schedule_batch_mixin
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.test_utils import CustomTestCase

DSPARK = SpeculativeAlgorithm.DSPARK
POOL_ROWS = 8
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
    arguments = {
        n: known[n] for n in inspect.signature(batch.process_prebuilt).parameters
    }
    cache = dict.fromkeys(
        ("checkpoint_kv_cache", "maybe_cache_unfinished_req"), mock.DEFAULT
    )
    with patch_existing(decode_schedule_batch_mixin, **cache):
        batch.process_prebuilt(**arguments)
    return batch, future_map


class HandoffTestCase(CustomTestCase):
    def setUp(self):
        no_hidden_states.start()
        self.addCleanup(no_hidden_states.stop)
        no_streams.start()
        self.addCleanup(no_streams.stop)


def make_input(tokens, indices=None):
    draft_input = make_next_draft_input(
        bonus_tokens=torch.tensor(tokens, dtype=torch.int64),
        new_seq_lens=torch.arange(1, len(tokens) + 1),
    )
    if indices is not None:
        draft_input.future_indices = torch.tensor(indices, dtype=torch.int64)
    return draft_input


def patch_existing(module, **replacements):
    """`mock.patch.multiple` for those of the names that the module has."""
    known = {k: v for k, v in replacements.items() if hasattr(module, k)}
    return mock.patch.multiple(module, **known) if known else ExitStack()
