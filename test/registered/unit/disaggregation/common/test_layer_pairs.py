"""Plain multi-head KV pools report layer ids, and peers then pair by layer.

Without ids NIXL refuses a pipelined prefill, and Mooncake guesses where V begins. The
property tests walk target layers x draft layers x pipeline splits; the guess is their
negative control.
"""

from __future__ import annotations

import struct
import unittest
from types import SimpleNamespace
from unittest import mock

import numpy as np
from kv_managers import (
    Wire,
    close,
    make_manager,
    mooncake_metadata,
    mooncake_registration,
    wait_for,
)

from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.common.layer_pairs import (
    compressed_mla_indices,
    pair_by_layer,
)
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    build_kv_layer_ids,
    build_transfer_entry_pairs,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

TARGET_LAYERS = (4, 7, 28, 32, 36, 40, 48, 62, 64)
DRAFT_LAYERS = (1, 2, 5, 7, 8, 36)
PIPELINES = (1, 2, 3, 4)


def make_pool(layers, start=0, cls=MHATokenToKVPool):
    pool = object.__new__(cls)
    pool.start_layer, pool.layer_num = start, layers
    pool.k_buffer = [object() for _ in range(layers)]
    pool.v_buffer = [object() for _ in range(layers)]
    return pool


def ids_of(pool, draft=None, num_hidden_layers=4):
    return build_kv_layer_ids(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=draft,
        num_draft_entries=2 * draft.layer_num if draft else 0,
        num_hidden_layers=num_hidden_layers,
    )


def stages(layers, count):
    """Layers per stage, the first ones one larger when they do not divide."""
    base, extra = divmod(layers, count)
    start = 0
    for stage in range(count):
        size = base + (stage < extra)
        yield start, size
        start += size


def combinations():
    for layers in TARGET_LAYERS:
        for draft in DRAFT_LAYERS:
            for pipeline in PIPELINES:
                for start, size in stages(layers, pipeline):
                    yield layers, draft, pipeline, start, size


def registered_names(layers, draft):
    """What a decode with a draft registers, in order."""
    names = [f"{kind}{i}" for kind in "KV" for i in range(layers)]
    return names + [f"d{kind}{i}" for kind in "KV" for i in range(draft)]


class TestReporting(CustomTestCase):
    def test_plain_pool_reports_ids(self):
        self.assertEqual(ids_of(make_pool(4)), [0, 1, 2, 3] * 2)
        self.assertEqual(ids_of(make_pool(2, start=2)), [2, 3] * 2)

    def test_draft_gets_its_own_band(self):
        ids = ids_of(make_pool(4), make_pool(2))
        self.assertEqual(ids, [0, 1, 2, 3] * 2 + [4, 5] * 2)

    def test_last_stage_with_draft_matches_decode(self):
        """A native pipelined prefill registers its draft on the last stage only."""
        ids = ids_of(make_pool(2, start=2), make_pool(2))
        pairs = build_transfer_entry_pairs(
            ids, ids_of(make_pool(4), make_pool(2)), len(ids), 12
        )
        self.assertEqual([j for _, j in pairs], [2, 3, 6, 7, 8, 9, 10, 11])

    def test_other_pools_stay_positional(self):
        class Scales(MHATokenToKVPool):
            def _pd_registerable_tensors(self):
                return [*self.k_buffer, *self.v_buffer, object()]

        self.assertEqual(ids_of(make_pool(4, cls=Scales)), [])
        self.assertEqual(ids_of(SimpleNamespace()), [])
        self.assertEqual(ids_of(make_pool(4), make_pool(2, cls=Scales)), [])


class TestPairing(CustomTestCase):
    def test_every_stage_reaches_its_layers(self):
        for layers, draft, _, start, size in combinations():
            source = ids_of(make_pool(size, start), num_hidden_layers=layers)
            target = ids_of(make_pool(layers), make_pool(draft), layers)
            names = registered_names(layers, draft)
            pairs = build_transfer_entry_pairs(source, target, len(source), len(target))
            found = [names[j] for _, j in pairs]
            expected = [f"{kind}{start + i}" for kind in "KV" for i in range(size)]
            self.assertEqual(found, expected, (layers, draft, start, size))

    def test_positional_guess_is_wrong_for_many(self):
        """Why ids are needed: the guess misplaces V without any error."""
        wrong = total = 0
        for layers, draft, _, start, size in combinations():
            manager = object.__new__(CommonKVManager)
            manager.kv_args = SimpleNamespace(prefill_start_layer=start)
            names = registered_names(layers, draft)
            *_, values, _ = manager.get_mha_kv_ptrs_with_pp(
                list(range(2 * size)), names
            )
            total += 1
            wrong += values != [f"V{start + i}" for i in range(size)]
        self.assertGreater(wrong, 100)
        self.assertLess(wrong, total)

    def test_mooncake_never_guesses(self):
        """With ids on both sides the flat sender pairs by them, even with a draft."""
        manager = object.__new__(MooncakeKVManager)
        manager.is_mla_backend = manager.is_hybrid_mla_backend = False
        manager.pp_size, manager.state_strides_validated = 4, set()
        manager.enable_custom_mem_pool = False
        manager.max_transfer_batch_indices = 1 << 20
        moved = []
        manager._transfer_data = lambda _s, blocks: moved.extend(blocks) or 0
        manager._await_transfer_futures = lambda futures: 0
        manager.get_mha_kv_ptrs_with_pp = mock.Mock(side_effect=AssertionError("guess"))
        source = ids_of(make_pool(8, 24), num_hidden_layers=32)
        target = ids_of(make_pool(32), make_pool(8), 32)
        executor = SimpleNamespace(submit=lambda f, *a: f(*a))
        manager._send_kvcache_generic(
            mooncake_session_id="d",
            src_data_ptrs=[10_000 * (i + 1) for i in range(16)],
            dst_data_ptrs=[1_000_000 * (j + 1) for j in range(80)],
            item_lens=[64] * 16,
            prefill_data_indices=np.array([0], dtype=np.int32),
            dst_data_indices=np.array([0], dtype=np.int32),
            executor=executor,
            src_layer_ids=source,
            dst_layer_ids=target,
        )
        expected = [24 + i for i in range(8)] + [32 + 24 + i for i in range(8)]
        self.assertEqual([dst // 1_000_000 - 1 for _, dst, _ in moved], expected)

    def test_mooncake_refuses_buffers_that_do_not_fit(self):
        """Its worker would fail every request, and take a living decode for dead."""

        def answer_to(ranks, lengths):
            manager = make_manager(
                MooncakeKVManager,
                DisaggregationMode.PREFILL,
                kv_layer_ids=ids_of(make_pool(2), make_pool(1), 2),
                kv_data_ptrs=[1, 2, 3, 4, 5, 6],
                kv_item_lens=[64] * 4 + [32] * 2,
            )
            self.addCleanup(close, manager)
            manager._publish_peer_registration = (
                manager.decode_kv_args_table.__setitem__
            )
            manager.start_prefill_thread()
            wire = Wire(manager)
            self.addCleanup(wire.close)
            frames = mooncake_registration(wire.port, pointers=len(lengths))
            frames[8] = str(ranks).encode()
            ids = manager.kv_args.kv_layer_ids
            frames[12] = struct.pack(f"{len(lengths)}I", *ids[: len(lengths)])
            frames[19] = struct.pack(f"{len(lengths)}Q", *lengths)
            wire.send(*frames)
            wire.send(*mooncake_metadata(7, wire.port))
            wait_for(lambda: 7 in manager.transfer_infos or manager.admission.verdicts)
            return manager.admission.refused.get("host:1", "admitted")

        halves = [32] * 4 + [16] * 2
        for text in ("[PD-REGISTRATION]", "need one KV shape for target and draft"):
            self.assertIn(text, answer_to(2, halves))
        fewer = answer_to(1, [64] * 4)
        self.assertIn("fewer KV regions (4) than prefill (6)", fewer)
        self.assertEqual(answer_to(1, [64] * 4 + [32] * 2), "admitted")

    def test_nixl_stage_pairs_with_whole_decode(self):
        """Stock refuses this pair, and its control thread dies of it."""
        manager = object.__new__(NixlKVManager)
        manager.pp_size, manager.is_mla_backend = 2, False
        manager.is_hybrid_mla_backend = False
        manager.kv_args = SimpleNamespace(
            kv_layer_ids=ids_of(make_pool(2, start=2)), mla_compression_ratios=None
        )
        peer = SimpleNamespace(dst_kv_layer_ids=ids_of(make_pool(4), make_pool(2)))
        indices = manager._build_transfer_dst_indices(peer_info=peer, n_src=4, n_dst=12)
        self.assertEqual(indices, [2, 3, 6, 7])

    def slices(self, source_lens, target_lens):
        manager = object.__new__(NixlKVManager)
        manager.kv_args = SimpleNamespace(
            kv_layer_ids=ids_of(make_pool(2, start=2)),
            kv_data_ptrs=[1, 2, 3, 4],
            kv_item_lens=source_lens,
            page_size=1,
            total_kv_head_num=4,
            kv_head_num=4,
            engine_rank=0,
            gpu_id=0,
            kv_data_lens=[640] * 4,
            prefill_start_layer=2,
        )
        peer = SimpleNamespace(
            dst_kv_layer_ids=ids_of(make_pool(4), make_pool(2)),
            dst_kv_ptrs=list(range(100, 112)),
            dst_kv_item_lens=target_lens,
            dst_kv_item_len=target_lens[0],
            decode_tp_size=2,
            decode_tp_rank=0,
            dst_num_slots=10,
            gpu_id=0,
        )
        manager.attn_tp_size, manager.prep_handle_slice_src = 1, None
        manager.prep_handles_slice_dst, prepared = {}, []
        manager._pack_stride_descs = lambda runs: runs
        manager._prep_xfer_dlist = lambda peer, runs, _kind: prepared.append(runs)
        manager._init_hetero_tp_prep_handle("d", peer)
        return prepared

    def test_nixl_slices_pair_by_layer(self):
        """Prefill TP 1 and PP 2, decode TP 2 with a draft: V of stage 2 is at 6, 7."""
        sources, targets = self.slices([64] * 4, [32] * 12)
        self.assertEqual([run[0] for run in sources], [1, 2, 3, 4])
        self.assertEqual([run[0] - 100 for run in targets], [2, 3, 6, 7])

    def test_slices_of_unequal_shapes_are_refused(self):
        with self.assertRaisesRegex(ValueError, "one KV shape"):
            self.slices([64] * 4, [32] * 6 + [16] * 6)

    def test_one_sided_ids_keep_sglangs_pairing(self):
        manager = SimpleNamespace(kv_args=SimpleNamespace(kv_layer_ids=[0, 0]))
        peer = SimpleNamespace(dst_kv_layer_ids=[])
        kept = ([1], [2])
        self.assertIs(pair_by_layer(manager, peer, positional=kept), kept)

    def test_peers_that_know_no_ids_keep_sglangs_pairing(self):
        """SGLang's slices ask neither engine for ids, so neither need have them."""
        kept = ([1], [2])
        manager = SimpleNamespace(kv_args=SimpleNamespace())
        for peer in (SimpleNamespace(), SimpleNamespace(dst_kv_layer_ids=[0, 0])):
            self.assertIs(pair_by_layer(manager, peer, positional=kept), kept)


class TestCompressedMla(CustomTestCase):
    """Buffers are grouped: C4 KV, C4 indexer KV, C128 KV, layers ascending in each."""

    RATIOS = [0, 4, 128, 4, 128, 4, 128, 4]

    def names(self, start, end):
        layers = range(start, end)
        c4 = [i for i in layers if self.RATIOS[i] == 4]
        c128 = [i for i in layers if self.RATIOS[i] == 128]
        return (
            [f"c4.{i}" for i in c4]
            + [f"index.{i}" for i in c4]
            + [f"c128.{i}" for i in c128]
        )

    def place(self, start, end, *, pp_size=2, item_lens=None):
        own, whole = self.names(start, end), self.names(0, 8)
        manager = object.__new__(NixlKVManager)
        manager.pp_size, manager.is_mla_backend = pp_size, True
        manager.is_hybrid_mla_backend = False
        manager.kv_args = SimpleNamespace(
            kv_layer_ids=[],
            mla_compression_ratios=self.RATIOS,
            prefill_start_layer=start,
            prefill_end_layer=end,
            kv_item_lens=[len(name) for name in own],
        )
        peer = SimpleNamespace(
            dst_kv_layer_ids=[],
            dst_kv_item_lens=item_lens or [len(name) for name in whole],
        )
        indices = manager._build_transfer_dst_indices(
            peer_info=peer, n_src=len(own), n_dst=len(whole)
        )
        return [whole[j] for j in indices]

    def test_stages_cover_the_decode(self):
        """Stock refuses this pair in its control thread, which dies of it."""
        for bounds in ([0, 4, 8], [0, 3, 5, 8], [0, 1, 8]):
            reached = []
            for start, end in zip(bounds, bounds[1:], strict=False):
                with self.subTest(start=start, end=end):
                    found = self.place(start, end)
                    self.assertEqual(found, self.names(start, end))
                    reached += found
            self.assertEqual(sorted(reached), sorted(self.names(0, 8)))

    def test_other_sizes_are_refused(self):
        with self.assertRaisesRegex(RuntimeError, "differ in KV bytes"):
            self.place(0, 4, item_lens=[1] * len(self.names(0, 8)))

    def test_without_a_pipeline_nothing_else_is_asked(self):
        manager = SimpleNamespace(pp_size=1)
        self.assertIsNone(compressed_mla_indices(manager, SimpleNamespace(), 2, 4))

    def test_without_a_pipeline_sglang_decides(self):
        self.assertEqual(self.place(0, 8, pp_size=1), self.names(0, 8))


if __name__ == "__main__":
    unittest.main()
