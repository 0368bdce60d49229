"""What an engine of the handoff gets at start-up, and that others stay as they are."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import msgspec
import torch
from handoff_fixtures import (
    DECODE,
    HandoffCase,
    draft_config,
    server_args,
    target_config,
)

from sglang.srt.arg_groups import validation_hook
from sglang.srt.disaggregation.agreement import tail as agreed
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dspark_components import dspark_handoff as handoff
from sglang.srt.speculative.dspark_components import dspark_handoff_startup as startup
from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
from sglang.srt.speculative.dspark_components.dspark_handoff_decode import Draft
from sglang.srt.speculative.dspark_components.handoff_refusals import (
    ALLOW_COLD_DRAFT,
    ALLOW_PARTIAL_CONTEXT,
    CAPTURE,
    LAYER_IDS,
    MOONCAKE_POOL,
    RUST_SERVER,
    TAIL_TOKENS,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

TARGET_ON_DISK = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
CONFIG_OF = "sglang.srt.arg_groups.overrides.model_config_of"


class TestRefusals(HandoffCase):
    """That start-up asks the table (``test_handoff_refusals``) with the right facts."""

    def check(self, draft=None, **args):
        record = server_args(**args)
        with (
            self.drafts(draft or draft_config(window=32)),
            mock.patch(CONFIG_OF, lambda _: target_config()),
        ):
            startup.validate_server_args(record)

    def test_argument_checks_call_it(self):
        """Without the call every refusal below would reach the first request."""
        os.environ.update({CAPTURE: "1", TAIL_TOKENS: "0", LAYER_IDS: "0,1"})
        with self.refuse(TAIL_TOKENS), mock.patch(CONFIG_OF, lambda _: target_config()):
            validation_hook.check_server_args(server_args())

    def test_capturing_prefill(self):
        os.environ.update({CAPTURE: "1", LAYER_IDS: "0,1"})
        self.check()
        with self.refuse("--enable-pdmux"):
            self.check(enable_pdmux=True)
        with self.refuse("--enable-layernorm-sp"):
            self.check(enable_layernorm_sp=True)
        os.environ[LAYER_IDS] = "0,7"
        with self.refuse(f"{LAYER_IDS}=0,7.*last layer"):
            self.check()

    def test_capture_elsewhere(self):
        os.environ.update({CAPTURE: "1", LAYER_IDS: "0,1"})
        for mode in ("decode", "null"):
            with self.refuse(f"--disaggregation-mode {mode}"):
                self.check(disaggregation_mode=mode)
        with self.refuse("--speculative-algorithm EAGLE"):
            self.check(speculative_algorithm="EAGLE")

    def test_decode(self):
        """It is refused for what it says of tails, and for nothing if it says nothing."""
        self.check(**DECODE, enable_hisparse=True)
        os.environ[LAYER_IDS] = "0,1"
        with self.refuse(r"0,1 on decode.*\(0, 2, 4\)"):
            self.check(**DECODE)
        os.environ[LAYER_IDS] = "0,2,4"
        self.check(**DECODE)
        os.environ[TAIL_TOKENS] = "-1"
        self.check(**DECODE, disaggregation_decode_enable_radix_cache=True)
        with self.refuse("--enable-hisparse"):
            self.check(**DECODE, enable_hisparse=True)
        os.environ[TAIL_TOKENS] = "8"
        with self.refuse(f"{ALLOW_PARTIAL_CONTEXT}=1"):
            self.check(**DECODE)

    def test_transfer_of_both_engines(self):
        os.environ.update({TAIL_TOKENS: "-1", MOONCAKE_POOL: "True"})
        self.check(**DECODE)
        with self.refuse(MOONCAKE_POOL):
            self.check(**DECODE, disaggregation_transfer_backend="mooncake")
        os.environ.update({CAPTURE: "1", LAYER_IDS: "0,1", TAIL_TOKENS: "8"})
        self.check()
        with self.refuse(MOONCAKE_POOL):
            self.check(disaggregation_transfer_backend="mooncake")

    def test_a_registry_that_describes_no_prefill(self):
        """Decodes refuse what they cannot check, and nobody else would say why."""
        os.environ[RUST_SERVER] = "1"
        with self.assertLogs(startup.logger, "WARNING") as logs:
            self.check(speculative_algorithm="DSPARK")
        self.assertIn(f"unless it has {ALLOW_COLD_DRAFT}=1", logs.output[0])
        with self.assertNoLogs(startup.logger, "WARNING"):
            self.check()
        os.environ[LAYER_IDS] = "0,1"
        with self.refuse("TAIL-RUST-SERVER"):
            self.check()

    def test_variables_that_do_nothing(self):
        os.environ.update({LAYER_IDS: "0,1", CAPTURE: "0"})
        for mode in ("prefill", "decode", "null"):
            with self.subTest(mode), self.refuse(f"{LAYER_IDS} set, with no effect"):
                self.check(disaggregation_mode=mode)

    def test_cold_draft_with_shared_slots(self):
        os.environ[ALLOW_COLD_DRAFT] = "1"
        self.check(**DECODE)
        with self.refuse(f"radix-cache.*{ALLOW_COLD_DRAFT}"):
            self.check(**DECODE, disaggregation_decode_enable_radix_cache=True)

    def test_other_engines_read_no_config(self):
        """Without a variable no model config is built and nothing is refused."""
        unread = mock.Mock(side_effect=AssertionError)
        with mock.patch(CONFIG_OF, unread):
            for mode in ("null", "prefill", "decode"):
                for algorithm in (None, "DSPARK", "EAGLE"):
                    args = dict(
                        disaggregation_mode=mode,
                        speculative_algorithm=algorithm,
                        enable_two_batch_overlap=True,
                    )
                    startup.validate_server_args(server_args(**args))

    def resolved(self, **args):
        """Arguments as an engine resolves them, from a target's config on disk."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        pathlib.Path(folder, "config.json").write_text(json.dumps(TARGET_ON_DISK))
        record = ServerArgs(
            model_path=folder,
            device="cpu",
            skip_tokenizer_init=True,
            disaggregation_mode="prefill",
            disaggregation_transfer_backend="nixl",
            **args,
        )
        record.resolve_once()
        return record

    def test_prefill_graphs_with_a_pipeline(self):
        """Whichever flag asks for them: a replayed stage misses the earlier ones."""
        os.environ.update({CAPTURE: "1", LAYER_IDS: "0,1"})
        asked = {
            "breakable": {"cuda_graph_backend_prefill": "breakable"},
            "full": {"cuda_graph_backend_prefill": "full"},
            "breakable, JSON": {
                "cuda_graph_config": {"prefill": {"backend": "breakable"}}
            },
            "full, JSON": {"cuda_graph_config": {"prefill": {"backend": "full"}}},
        }
        for name, flags in asked.items():
            backend = name.split(",")[0]
            way_out = f"{backend}.*--cuda-graph-backend-prefill disabled"
            with self.subTest(name), self.refuse(way_out):
                startup.validate_server_args(self.resolved(pp_size=2, **flags))
            with self.subTest(name, pp_size=1):
                startup.validate_server_args(self.resolved(**flags))
        startup.validate_server_args(self.resolved(pp_size=2))

    def test_pipelined_prefill_with_a_draft(self):
        """It captures on its stages as well, so the same is refused."""
        graphs = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
        args = dict(speculative_algorithm="DSPARK", pp_size=2)
        self.check(**args)
        with self.refuse("--cuda-graph-backend-prefill disabled"):
            self.check(**args, cuda_graph_config=graphs)


class TestCaptureConfig(HandoffCase):
    def resolve(self, is_draft_worker=False, target=None):
        features = SimpleNamespace(aux_hidden_state_capture=None)
        exec_config = SimpleNamespace(features=features)
        with mock.patch.object(spec_aux_hidden_state, "get_exec", lambda: exec_config):
            return spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
                server_args=server_args(),
                model_config=target or target_config(),
                spec_algorithm=SpeculativeAlgorithm.NONE,
                is_draft_worker=is_draft_worker,
            )

    def test_runner_is_told_the_layers(self):
        self.assertFalse(self.resolve().dflash_use_aux_hidden_state)
        os.environ[LAYER_IDS] = "0,2,4"
        config = self.resolve()
        self.assertEqual(handoff.current().spec.tail_tokens, 8)
        self.assertTrue(config.dflash_use_aux_hidden_state and config.is_dspark)
        self.assertEqual(config.dflash_target_layer_ids, [0, 2, 4])
        self.assertIsNone(config.dflash_draft_num_layers)
        self.assertFalse(self.resolve(is_draft_worker=True).dflash_use_aux_hidden_state)
        self.assertEqual(handoff.peer_draft_tokens(), 0)

    def test_deepseek_v4_learns_its_decodes_draft_tokens(self):
        os.environ.update({CAPTURE: "1", LAYER_IDS: "0,7"})
        target = target_config(
            dspark_block_size=7, dspark_target_layer_ids=[0, 7], sliding_window=8
        )
        target.hf_config.architectures = ["DeepseekV4ForCausalLM"]
        self.resolve(target=target)
        self.assertEqual(handoff.peer_draft_tokens(), 8)


class TestAttach(HandoffCase):
    """What a scheduler gets when its metadata buffers exist."""

    def test_a_scheduler_asks_for_its_tail(self):
        """Both roles have it before their queues take buffers and slots over."""
        source = inspect.getsource(inspect.unwrap(Scheduler.init_disaggregation))
        place = 0
        for queue in ("DecodeTransferQueue(", "PrefillBootstrapQueue("):
            built = source.index(".disagg_metadata_buffers = MetadataBuffers(", place)
            attached = source.index(".disagg_metadata_buffers = with_tail(", built)
            place = source.index(queue, built)
            self.assertLess(attached, place)
            self.assertNotIn("disagg_metadata_buffers.", source[built:attached])

    def scheduler(self, **args):
        arguments = server_args(**args)
        return SimpleNamespace(
            server_args=arguments,
            disaggregation_mode=DisaggregationMode(arguments.disaggregation_mode),
            model_config=target_config(),
            spec_algorithm=SpeculativeAlgorithm.NONE,
            req_to_metadata_buffer_idx_allocator="SGLang's",
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(5, 16)),
        )

    def attach(self, scheduler, last=True):
        """Whether the scheduler's buffers became those of a handoff."""
        buffers = SimpleNamespace(bootstrap_room=torch.zeros(1))
        parallel = SimpleNamespace(
            pp_group=SimpleNamespace(is_last_rank=last), tp_size=1, pp_size=1, nnodes=1
        )
        context = "sglang.srt.runtime_context.get_parallel"
        said = mock.patch.object(agreed, "describers", [])
        with mock.patch(context, lambda: parallel), said as describers:
            found = startup.with_tail(scheduler, buffers, 4)
        self.assertEqual(describers, [handoff.describe_role])
        if found is buffers:
            return False
        self.assertIs(found.bootstrap_room, buffers.bootstrap_room)
        return True

    def capture(self):
        shape = handoff.shape_of(handoff.DraftFacts((0, 1), None), target_config())
        handoff.activate(spec=msgspec.structs.replace(shape, tail_tokens=3))

    def test_rows_of_the_last_stage(self):
        """One for each request it may run, and for the pool's padding index."""
        self.capture()
        self.assertTrue(self.attach(self.scheduler()))
        tail = handoff.current().tail
        self.assertEqual(tuple(tail.hidden_states.shape), (5, 3, 32))

    def test_earlier_stages_have_none(self):
        self.capture()
        self.assertFalse(self.attach(self.scheduler(), last=False))
        self.assertIsNone(handoff.current().tail)
        self.assertEqual(tails.cap_prefix_match(19, 20), 17)

    def test_other_engines_get_nothing(self):
        for mode in ("prefill", "decode", "null"):
            scheduler = self.scheduler(disaggregation_mode=mode)
            self.assertFalse(self.attach(scheduler))
            self.assertEqual(handoff.current(), handoff.Handoff())
            slots = scheduler.req_to_metadata_buffer_idx_allocator
            self.assertEqual(slots, "SGLang's")

    def test_memory_is_checked(self):
        self.capture()
        memory = SimpleNamespace(total=100)
        with mock.patch("psutil.virtual_memory", lambda: memory):
            with self.refuse("--max-running-requests"):
                self.attach(self.scheduler())

    def decode(self, captured=(0, 2, 4), pool=None, warm_up=None, **args):
        scheduler = self.scheduler(**{**DECODE, **args})
        scheduler.spec_algorithm = SpeculativeAlgorithm.DSPARK
        runner = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=draft_config(window=32))
        )
        aux = SimpleNamespace(dflash_target_layer_ids=list(captured))
        scheduler.draft_worker = SimpleNamespace(
            draft_model_runner=runner,
            primary_draft_kv_pool=pool or SimpleNamespace(k_buffer=[]),
            model_runner=SimpleNamespace(spec_aux_config=aux),
        )
        injected = mock.Mock(side_effect=warm_up)
        module = "sglang.srt.speculative.dspark_components.dspark_handoff_decode."
        with mock.patch(module + "warm_up", injected):
            self.assertTrue(self.attach(scheduler))
        self.injected = injected.call_count
        return scheduler, handoff.current().draft

    def test_decode_is_ready_for_tails_without_a_variable(self):
        scheduler, draft = self.decode()
        self.assertEqual((draft.no_tail, draft.pinned_tokens), (None, None))
        self.assertEqual(draft.shape.window_need, 31)
        self.assertIsNone(handoff.current().tail)
        slots = scheduler.req_to_metadata_buffer_idx_allocator
        self.assertIs(slots, handoff.current().slots)
        self.assertEqual(slots.size, 4)
        self.assertEqual(self.injected, 1)
        self.assertEqual(tails.cap_prefix_match(19, 20), 19)

    def test_decode_may_pin_the_length(self):
        os.environ[TAIL_TOKENS] = "-1"
        self.assertEqual(self.decode()[1].pinned_tokens, 31)

    def test_decode_says_why_it_takes_no_tail(self):
        """And serves native prefills all the same; unless it was told to want tails."""
        for args, reason in (
            ({"dcp_size": 2}, "--dcp-size 2"),
            ({"enable_hisparse": True}, "--enable-hisparse"),
            ({"captured": (1, 3, 5)}, r"\(0, 2, 4\).*maps them to \(1, 3, 5\)"),
            ({"warm_up": RuntimeError("no kernel")}, "RuntimeError: no kernel"),
        ):
            with self.subTest(args):
                os.environ.pop(TAIL_TOKENS, None)
                self.assertRegex(self.decode(**args)[1].no_tail, reason)
                os.environ[TAIL_TOKENS] = "-1"
                with self.refuse(f"{TAIL_TOKENS} is set on a decode.*{reason}"):
                    self.decode(**args)

    def test_decode_says_which_tails_must_cover_its_draft(self):
        radix = {"disaggregation_decode_enable_radix_cache": True}
        masked = SimpleNamespace(set_swa_valid_from=None)
        vectorized = SimpleNamespace(k_buffer=[], kv_cache_layout="vectorized_5d")
        for args, reason in (
            ({}, None),
            (radix, "radix-cache"),
            ({"pool": masked, **radix}, None),
            ({"pool": vectorized}, "keeps no entry per token slot"),
        ):
            with self.subTest(args):
                found = self.decode(**args)[1].must_cover
                self.assertRegex(found or "", reason or "^$")

    def test_an_engine_that_became_a_decode_looks_after_its_draft(self):
        """A switch of roles leaves the arguments as they were at the start."""
        scheduler, _ = self.decode()
        scheduler.server_args.disaggregation_mode = "prefill"
        scheduler.server_args.enable_pd_role_switch = True
        handoff.deactivate()
        self.assertTrue(self.attach(scheduler))
        draft = handoff.current().draft
        self.assertEqual(draft.shape.window_need, 31)
        self.assertIn("--enable-pd-role-switch", draft.no_tail)


class TestDescription(HandoffCase):
    def test_decode_takes_both_unless_it_says_why_not(self):
        shape = handoff.shape_of(handoff.DraftFacts((0, 2, 4), 31), target_config())
        pool = SimpleNamespace(k_buffer=[])
        for more, mode, keys in (
            ({}, "tail", {}),
            ({"no_tail": "why"}, "native", {"no_tail": "why"}),
            ({"pinned_tokens": 31}, "tail", {"tail_tokens": 31}),
        ):
            handoff.activate(draft=Draft(pool, shape, **more))
            found = handoff.describe_role(
                "decode", server_args(**DECODE), target_config()
            )
            self.assertEqual(found.pop("mode"), mode)
            self.assertEqual(found.pop("window_need"), 31)
            for key in ("layer_ids", "hidden_size", "dtype"):
                found.pop(key)
            self.assertEqual(found, keys)


if __name__ == "__main__":
    unittest.main()
