"""After a prefill/decode handoff the first decode step has its draft input.

Pins the whole contract of ``disagg_first_decode``: what DSPARK rebuilds with the
overlap schedule on and off, what the relay holds then, what happens to an
algorithm that rebuilds nothing, the start-up refusal that keeps such an algorithm
from ever getting there, and that the relay never answers for a batch that nobody
relayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.arg_groups import speculative_hook
from sglang.srt.disaggregation import decode_schedule_batch_mixin
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dspark_components import disagg_first_decode
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

DSPARK = SpeculativeAlgorithm.DSPARK
POOL_ROWS = 8
STALE_TOKEN = 999
# DSPARK relays no hidden states; asking would need a published server config.
no_hidden_states = mock.patch(
    "sglang.srt.speculative.spec_utils.spec_need_hidden_states", return_value=False
)
# Older releases pin relay entries to a stream whatever the device; the CPU has none.
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
        self.reqs = [
            SimpleNamespace(
                rid=f"rid-{i}", output_ids=[token], grammar=None,
                swa_branching_seqlen=None,
            )
            for i, token in enumerate(tokens)
        ]  # fmt: skip
        self.spec_info = None
        self.input_ids = None

    def batch_size(self):
        return len(self.reqs)


def hand_off(algorithm=DSPARK, overlap=True, tokens=(41, 42), future_map=None):
    """Run the real prebuilt path for two requests and return (batch, future_map)."""
    future_map = future_map or make_future_map()
    batch = PrebuiltBatch(
        algorithm, tokens, rows=[5, 2], seq_lens=[30, 7], overlap=overlap
    )
    arguments = [future_map]
    if "server_args" in inspect.signature(batch.process_prebuilt).parameters:
        arguments.insert(0, SimpleNamespace())
    names = ("checkpoint_kv_cache", "maybe_cache_unfinished_req")
    with mock.patch.multiple(
        decode_schedule_batch_mixin,
        **{
            name: mock.DEFAULT
            for name in names
            if hasattr(decode_schedule_batch_mixin, name)
        },
    ):
        batch.process_prebuilt(*arguments)
    return batch, future_map


class TestDSparkHandoffInput(CustomTestCase):
    def setUp(self):
        for patch in (no_hidden_states, no_streams):
            patch.start()
            self.addCleanup(patch.stop)

    def test_input_is_complete(self):
        """Without it the first decode step finds None and the scheduler dies."""
        for overlap in (True, False):
            with self.subTest(overlap=overlap):
                batch, _ = hand_off(overlap=overlap)
                self.assertIsNotNone(batch.spec_info)
                self.assertEqual(batch.spec_info.bonus_tokens.tolist(), [41, 42])
                self.assertEqual(batch.spec_info.new_seq_lens.tolist(), [30, 7])

    def test_overlap_input_is_relayed(self):
        """The next step reads the request's relay entry and must find these tokens."""
        batch, future_map = hand_off(overlap=True)
        self.assertEqual(batch.spec_info.future_indices.tolist(), [5, 2])
        self.assertEqual(future_map.new_seq_lens_buf[[5, 2]].tolist(), [30, 7])
        batch.spec_info.bonus_tokens = torch.zeros(2, dtype=torch.int64)
        future_map._resolve_spec_extras(batch)
        self.assertEqual(batch.spec_info.bonus_tokens.tolist(), [41, 42])

    def test_nothing_is_relayed_without_overlap(self):
        batch, _ = hand_off(overlap=False)
        self.assertIsNone(batch.spec_info.future_indices)

    def test_handed_off_requests_survive_filter_and_merge(self):
        running, future_map = hand_off(overlap=True)
        running.spec_info.filter_batch(torch.tensor([1]), [1])
        arrived = make_next_draft_input(
            bonus_tokens=torch.tensor([77]), new_seq_lens=torch.tensor([9])
        )
        newcomer = PrebuiltBatch(DSPARK, [77], rows=[6], seq_lens=[9], overlap=True)
        disagg_first_decode.enter_first_decode(newcomer, arrived, future_map)
        running.spec_info.merge_batch(arrived)
        self.assertEqual(running.spec_info.future_indices.tolist(), [2, 6])
        running.reqs = [running.reqs[1], newcomer.reqs[0]]
        future_map._resolve_spec_extras(running)
        self.assertEqual(running.spec_info.bonus_tokens.tolist(), [42, 77])


class TestFirstDecodeStep(CustomTestCase):
    """The step after the handoff, where stock 0.5.16 takes the scheduler down."""

    def setUp(self):
        for patch in (no_hidden_states, no_streams):
            patch.start()
            self.addCleanup(patch.stop)

    def test_first_step_is_prepared(self):
        for overlap in (True, False):
            with self.subTest(overlap=overlap):
                batch, _ = hand_off(overlap=overlap)
                self.assertIs(self.prepared_by(batch), batch.spec_info)

    def prepared_by(self, batch):
        """Run the release's own dispatch and return the input that was prepared."""
        prepared = []
        no_mamba = mock.MagicMock()
        no_mamba.return_value.mamba.enable_mamba_extra_buffer_lazy = False
        no_lazy = mock.Mock(return_value=False)
        with contextlib.ExitStack() as patches:
            patches.enter_context(
                mock.patch.object(
                    DFlashDraftInputV2,
                    "prepare_for_decode",
                    lambda draft_input, batch: prepared.append(draft_input),
                )
            )
            # What the dispatch asks of the published config, by release.
            for name, answer in (
                ("get_exec", no_mamba),
                ("mamba_extra_buffer_lazy_enabled", lambda: False),
                (
                    "get_server_args",
                    lambda: SimpleNamespace(enable_mamba_extra_buffer_lazy=no_lazy),
                ),
            ):
                if hasattr(spec_utils, name):
                    patches.enter_context(mock.patch.object(spec_utils, name, answer))
            spec_utils.spec_prepare_for_decode(batch)
        return prepared[0]


class TestOwnBuilder(CustomTestCase):
    """The builder for releases without a DSPARK branch, whatever the release."""

    def setUp(self):
        for patch in (no_hidden_states, no_streams):
            patch.start()
            self.addCleanup(patch.stop)

    def build(self, overlap):
        future_map = make_future_map()
        batch = PrebuiltBatch(
            DSPARK, (41, 42), rows=[5, 2], seq_lens=[30, 7], overlap=overlap
        )
        built = disagg_first_decode.build_first_decode_input(
            batch, torch.tensor([41, 42]), future_map
        )
        return batch, built, future_map

    def test_matches_what_the_release_builds(self):
        for overlap in (True, False):
            with self.subTest(overlap=overlap):
                _, built, future_map = self.build(overlap)
                reference, reference_map = hand_off(overlap=overlap)
                reference = reference.spec_info
                self.assertEqual(type(built), type(reference))
                self.assertTrue(torch.equal(built.bonus_tokens, reference.bonus_tokens))
                self.assertTrue(torch.equal(built.new_seq_lens, reference.new_seq_lens))
                self.assertEqual(
                    built.future_indices is None, reference.future_indices is None
                )
                if overlap:
                    rows = [5, 2]
                    self.assertEqual(
                        future_map.output_tokens_buf[rows].tolist(),
                        reference_map.output_tokens_buf[rows].tolist(),
                    )


class TestFirstDecodeContract(CustomTestCase):
    def setUp(self):
        for patch in (no_hidden_states, no_streams):
            patch.start()
            self.addCleanup(patch.stop)

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
        forgetful = make_next_draft_input(
            bonus_tokens=torch.tensor([41, 42]), new_seq_lens=torch.tensor([30, 7])
        )
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
    every_entry = torch.arange(POOL_ROWS)
    earlier = make_next_draft_input(
        bonus_tokens=torch.full((POOL_ROWS,), STALE_TOKEN),
        new_seq_lens=torch.full((POOL_ROWS,), 5),
    )
    future_map.stash(every_entry, RelayPayload.from_draft_input(earlier))
    return future_map


def make_input(tokens, indices=None):
    draft_input = make_next_draft_input(
        bonus_tokens=torch.tensor(tokens, dtype=torch.int64),
        new_seq_lens=torch.arange(1, len(tokens) + 1),
    )
    if indices is not None:
        draft_input.future_indices = torch.tensor(indices, dtype=torch.int64)
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
        self.future_map = make_used_future_map()

    def resolve(self, draft_input, num_reqs):
        self.future_map._resolve_spec_extras(make_batch(draft_input, num_reqs))
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

    def test_missing_token_column_is_an_error(self):
        draft_input = make_input([11])
        draft_input.bonus_tokens = None
        with self.assertRaisesRegex(RuntimeError, "future_indices is None"):
            self.resolve(draft_input, num_reqs=1)

    def test_relayed_input_is_still_read_from_its_entries(self):
        """The guard must not switch the relay off for a batch that uses it."""
        indices = torch.tensor([3, 1])
        fresh = make_input([31, 32], indices=[3, 1])
        self.future_map.stash(indices, RelayPayload.from_draft_input(fresh))
        draft_input = self.resolve(make_input([0, 0], indices=[3, 1]), num_reqs=2)
        self.assertEqual(draft_input.bonus_tokens.tolist(), [31, 32])


class TestStartUpRefusal(CustomTestCase):
    def test_who_takes_a_handoff(self):
        takes = disagg_first_decode.takes_handoff
        for name in ("DSPARK", "EAGLE", "EAGLE3"):
            self.assertTrue(takes(SpeculativeAlgorithm.from_string(name)), name)
        for name in ("NGRAM", "STANDALONE"):
            self.assertFalse(takes(SpeculativeAlgorithm.from_string(name)), name)

    def test_the_answer_is_that_of_the_releases_builder(self):
        """Without a branch for an algorithm the builder returns None at once."""
        for algorithm in SpeculativeAlgorithm:
            if algorithm.is_none():
                continue
            build = algorithm.build_disagg_draft_input
            nothing = [None] * len(inspect.signature(build).parameters)
            try:
                branch = build(*nothing) is not None
            except Exception:
                branch = True  # It has one, which wants a real batch.
            with self.subTest(algorithm.name):
                self.assertEqual(disagg_first_decode.takes_handoff(algorithm), branch)

    def test_registered_algorithms_take_one_with_a_builder_of_their_own(self):
        class Builder(CustomSpecAlgo):
            def build_disagg_draft_input(self, *_):
                return "input"

        takes = disagg_first_decode.takes_handoff
        self.assertFalse(takes(CustomSpecAlgo("PLAIN", lambda _: None)))
        self.assertTrue(takes(Builder("OWN", lambda _: None)))

    def test_only_the_decode_engine_is_refused(self):
        ngram = SpeculativeAlgorithm.NGRAM
        for mode in ("null", "prefill"):
            args = SimpleNamespace(disaggregation_mode=mode)
            disagg_first_decode.refuse_without_handoff(ngram, args)
        args = SimpleNamespace(disaggregation_mode="decode")
        disagg_first_decode.refuse_without_handoff(DSPARK, args)
        disagg_first_decode.refuse_without_handoff(None, args)
        with self.assertRaisesRegex(ValueError, "NGRAM.*--disaggregation-mode decode"):
            disagg_first_decode.refuse_without_handoff(ngram, args)

    def test_argument_resolution_refuses(self):
        """The refusal happens while arguments are resolved, before any weight."""
        # Older releases resolve everything in the constructor, models included.
        unresolved = (
            mock.patch.object(ServerArgs, "__post_init__", lambda _: None)
            if dataclasses.is_dataclass(ServerArgs)
            else contextlib.nullcontext()
        )
        with unresolved:
            server_args = ServerArgs(
                model_path="unused",
                device="cpu",
                speculative_algorithm="NGRAM",
                disaggregation_mode="decode",
            )
        with self.assertRaisesRegex(ValueError, "NGRAM cannot run with"):
            speculative_hook.handle_speculative_decoding(server_args)


if __name__ == "__main__":
    unittest.main()
