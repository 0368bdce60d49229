"""What a running engine knows about itself, and who asks for it.

Contract: facts of the engine replace what its arguments only suggest; what is published
is what its pools allocate; an engine that cannot describe itself still starts.
"""

from __future__ import annotations

import inspect
import unittest

# export: only <0.5.23
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
from agreement_fixtures import NATIVE, patch_existing
from agreement_models import PLAIN_ARGS, TARGET

from sglang.srt import runtime_context
from sglang.srt.arg_groups import overrides
from sglang.srt.disaggregation.agreement import engine_facts
from sglang.srt.disaggregation.agreement.description import stages_divide
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import build_kv_layer_ids
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


class TestEngineFacts(CustomTestCase):
    """The running engine replaces what arguments only suggest."""

    def describe_rank(self, draft_pool=None, sharing=False, **args):
        config = SimpleNamespace(to_dict=lambda: TARGET)
        parallel = SimpleNamespace(
            attn_tp_size=2,
            attn_cp_size=4,
            attn_dcp_size=1,
            pp_size=1,
            enable_cp_tp_group_sharing=sharing,
        )
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(**(PLAIN_ARGS | args)),
            model_config=SimpleNamespace(hf_config=config),
        )
        kv_args = SimpleNamespace(page_size=64, kv_cache_dtype_str="auto")
        buffers = SimpleNamespace(
            output_ids=torch.zeros(1),
            kv_checksum=None,
            bootstrap_room=torch.zeros(1, 2),
        )
        queue = SimpleNamespace(
            metadata_buffers=buffers,
            token_to_kv_pool=SimpleNamespace(dtype=torch.float32),
            draft_token_to_kv_pool=draft_pool,
        )
        with (
            mock.patch.object(overrides, "resolved_view", lambda args: args),
            mock.patch.object(runtime_context, "get_parallel", lambda: parallel),
        ):
            engine_facts.describe_engine(scheduler, "prefill", kv_args, queue)
        return kv_args.engine_description

    def test_facts_of_the_engine(self):
        described = self.describe_rank()
        self.assertEqual(described["page_size"], 64)
        self.assertEqual(described["kv_storage"], "float32")
        self.assertEqual(described["aux"], ["output_ids:4", "bootstrap_room:8"])
        self.assertEqual(described["mode"], "none")
        self.assertFalse(described["kv_layer_ids"])
        self.assertNotIn("draft_kv_dtype", described)

    def test_dtype_of_the_drafts_pool(self):
        described = self.describe_rank(SimpleNamespace(dtype=torch.bfloat16))
        self.assertEqual(described["draft_kv_dtype"], "bfloat16")

    def test_a_rank_without_the_drafts_pool_does_not_guess_its_dtype(self):
        flags = {"speculative_algorithm": "DSPARK", "kv_cache_dtype": "fp8_e4m3"}
        self.assertNotIn("draft_kv_dtype", self.describe_rank(**flags))
        pool = SimpleNamespace(dtype=torch.float16)
        described = self.describe_rank(pool, **flags)
        self.assertEqual(described["draft_kv_dtype"], "float16")

    def test_parallel_sizes_are_the_engines_and_not_the_flags(self):
        flags = {"tp_size": 64, "dp_size": 2, "enable_dp_attention": False}
        described = self.describe_rank(**flags)
        self.assertEqual((described["tp"], described["cp"]), (2, 4))

    def test_prefill_pairs_by_the_ranks_that_it_registers(self):
        described = self.describe_rank(sharing=True)
        self.assertEqual((described["tp"], described["cp"]), (4, 1))

    def test_an_engine_that_cannot_describe_itself_still_starts(self):
        kv_args = SimpleNamespace()
        with self.assertLogs(engine_facts.logger, "ERROR"):
            engine_facts.describe_engine(object(), "prefill", kv_args, None)
        self.assertIsNone(kv_args.engine_description)


class TestStagePairing(CustomTestCase):
    """What a stage can be placed by, from SGLang's own pools and configs."""

    def pairing(self, backend, pool, *, layers=4, pp=2, attention="mha", ratios=None):
        description = {
            "backend": backend,
            "attention": attention,
            "target": {"layers": layers},
            "pp": pp,
        }
        kv_args = SimpleNamespace(mla_compression_ratios=ratios)
        return engine_facts.stage_pairing(description, pool, kv_args)

    def mha_pool(self):
        return object.__new__(MHATokenToKVPool)

    def test_plain_pools(self):
        self.assertEqual(self.pairing("nixl", self.mha_pool()), "none")
        self.assertEqual(self.pairing("mooncake", self.mha_pool()), "guess")
        self.assertEqual(self.pairing("mooncake", self.mha_pool(), layers=7), "none")

    def test_the_positional_guess_is_right_exactly_where_it_is_used(self):
        """Against SGLang's own positional pairing, all stages of many splits."""
        for layers in range(1, 25):
            for pp in range(2, min(layers, 5) + 1):
                right = True
                for rank in range(pp):
                    start, end = get_pp_indices(layers, rank, pp)
                    right &= self.guesses_right(layers, start, end)
                said = self.pairing("mooncake", self.mha_pool(), layers=layers, pp=pp)
                with self.subTest(layers=layers, pp=pp):
                    self.assertEqual(said == "guess", right)

    def guesses_right(self, layers, start, end):
        manager = object.__new__(CommonKVManager)
        manager.kv_args = SimpleNamespace(prefill_start_layer=start)
        names = [f"{kind}{i}" for kind in "KV" for i in range(layers)]
        own = [f"{kind}{i}" for kind in "KV" for i in range(start, end)]
        keys_src, values_src, keys, values, _ = manager.get_mha_kv_ptrs_with_pp(
            own, names
        )
        return keys == keys_src and values == values_src

    def test_a_partition_of_ones_own(self):
        name = "SGLANG_PP_LAYER_PARTITION"
        for partition, divides in (("2,2", True), ("1,3", False), ("1,1,2", True)):
            stages = partition.count(",") + 1
            self.assertIs(stages_divide(4, stages, {name: partition}), divides)

    def test_compressed_pools_report_no_ids_and_are_placed(self):
        pool = object.__new__(DeepSeekV4TokenToKVPool)
        ids = build_kv_layer_ids(
            token_to_kv_pool=pool,
            draft_token_to_kv_pool=None,
            num_draft_entries=0,
            num_hidden_layers=4,
        )
        self.assertEqual(ids, [])
        v4 = {"attention": "compressed_mla", "ratios": [0, 4, 128, 4]}
        self.assertEqual(self.pairing("mooncake", pool, **v4), "position")
        placed = "position"
        # export: only <0.5.23
        if find_spec("sglang.srt.disaggregation.common.layer_pairs") is None:
            placed = "none"
        self.assertEqual(self.pairing("nixl", pool, **v4), placed)

    # export: only <0.5.23
    def test_compressed_pools_where_nothing_places_them(self):
        with mock.patch("importlib.util.find_spec", return_value=None):
            nixl = self.pairing("nixl", None, attention="compressed_mla", ratios=[4])
        self.assertEqual(nixl, "none")

    def test_mla_pools(self):
        placed = "position"
        # export: only <0.5.21
        if not hasattr(CommonKVManager, "_mla_kv_entry_span_with_pp"):
            placed = "none"
        mla = {"attention": "mla"}
        self.assertEqual(self.pairing("mooncake", object(), **mla), "position")
        self.assertEqual(self.pairing("nixl", object(), **mla), placed)

    def test_other_backends_and_pools_are_not_known(self):
        self.assertIsNone(self.pairing("mori", self.mha_pool()))
        self.assertIsNone(self.pairing("mooncake", object()))


class TestRingFacts(CustomTestCase):
    """What the engine publishes is what its pools allocate."""

    def test_facts_come_from_sglangs_function(self):
        # export: only <0.5.21
        if not hasattr(pools, "resolve_compress_state_ring_size"):
            self.skipTest("ring sizes of this release do not depend on draft tokens")
        with mock.patch.object(pools, "resolve_compress_state_ring_size") as resolve:
            resolve.side_effect = lambda ratio: 100 + ratio
            found = engine_facts._rings(["4", "2"])
        self.assertEqual(found, {"4": 104, "2": 102})
        self.assertIsNone(engine_facts._rings([]))


class _Stop(Exception):
    """Ends a constructor where the KV manager would be built."""


class TestCallers(CustomTestCase):
    def describe_in(self, queue_class, module):
        """Run SGLang's `_init_kv_manager` up to the manager's class."""
        queue = mock.MagicMock()
        queue.scheduler = mock.MagicMock()
        queue.metadata_buffers = SimpleNamespace(get_buf_infos=lambda: ([], [], []))
        queue.draft_token_to_kv_pool = None
        queue.token_to_kv_pool = mock.MagicMock()
        queue.token_to_kv_pool.get_contiguous_buf_infos.return_value = ([], [], [])
        # The value of this option that means "off" was turned around in 0.5.22.
        off = int("threshold < 1" in inspect.getsource(module))
        queue.tp_rank = queue.pp_rank = 0
        queue.scheduler.enable_hisparse = False
        seen = []

        def end_here(*args):
            raise _Stop

        patches = {
            "get_kv_class": lambda backend, kind: (
                (lambda: SimpleNamespace(state_types=[]))
                if "KVARGS" in str(kind)
                else end_here()
            ),
            "get_kv_transfer_buf_infos": lambda pool: ([], [], []),
            "build_kv_layer_ids": lambda **kwargs: [],
            "setup_state_kv_args": lambda *args, **kwargs: None,
            "get_pd_kv_layout": lambda pool: None,
            "get_parallel": lambda: mock.MagicMock(attn_tp_size=1),
            "get_disagg": lambda: mock.MagicMock(
                disaggregation_decode_host_receive_threshold=off
            ),
            "get_device": lambda: mock.MagicMock(),
        }
        with (
            patch_existing(module, **patches),
            mock.patch.object(
                engine_facts, "_describe_rank", lambda *args: seen.append(args) or {}
            ),
            self.assertRaises(_Stop),
        ):
            queue_class._init_kv_manager(queue)
        self.assertEqual(len(seen), 1, "the engine was not described")
        self.assertIs(seen[0][0], queue.scheduler)
        self.assertIs(seen[0][3], queue, "the queue holds pools and buffers")
        return seen[0][1]

    def test_prefill_queue_describes_its_engine(self):
        from sglang.srt.disaggregation import prefill

        role = self.describe_in(PrefillBootstrapQueue, prefill)
        self.assertEqual(role, "prefill")

    def test_decode_queue_describes_its_engine(self):
        from sglang.srt.disaggregation import decode

        self.assertEqual(self.describe_in(DecodePreallocQueue, decode), "decode")

    def test_server_info_shows_the_description(self):
        # export: only <0.5.22
        if find_spec("sglang.srt.managers.scheduler_components.internal_state") is None:
            self.skipTest("this release builds its state in the scheduler (< 0.5.22)")
        from sglang.srt.managers.scheduler_components import internal_state

        controller_class = internal_state.SchedulerInternalStateController
        for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
            kv_args = SimpleNamespace(engine_description=NATIVE)
            manager = SimpleNamespace(kv_args=kv_args)
            scheduler = SimpleNamespace(**{queue: SimpleNamespace(kv_manager=manager)})
            controller = mock.MagicMock(scheduler=scheduler)
            context = mock.MagicMock()
            context.resolved_server_args_dict.return_value = {}
            with mock.patch.object(internal_state, "get_context", lambda c=context: c):
                answer = controller_class.get_internal_state(controller, None)
            shown = answer.internal_state["peer_description"]
            self.assertEqual(shown, NATIVE)

    def test_opt_out_is_declared(self):
        self.assertFalse(envs.SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT.get())
        with envs.SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT.override(True):
            self.assertTrue(envs.SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT.get())


if __name__ == "__main__":
    unittest.main()
