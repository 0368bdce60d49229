"""Knobs, start-up refusals and the shape of a tail of hidden rows.

Every bad input must end in one message that names the knob, the value found and what
to set, before any process is started; every good one in the same shape on both
engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.arg_groups import validation_hook
from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    get_server_return_hidden_states_mode,
)
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dspark_components import dspark_handoff as handoff
from sglang.srt.speculative.dspark_components import (
    dspark_handoff_decode as decode_side,
)
from sglang.srt.speculative.dspark_components import dspark_handoff_knobs as knobs
from sglang.srt.speculative.dspark_components import dspark_handoff_startup as startup
from sglang.srt.speculative.dspark_components import dspark_handoff_tail as tails
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

CAPTURE = "SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE"
LAYER_IDS = "SGLANG_DSPARK_PD_TARGET_LAYER_IDS"
TAIL = "SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS"
PARTIAL = "SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT"
COLD = "SGLANG_DSPARK_PD_ALLOW_COLD_DRAFT"
PEER_TOKENS = "SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS"
POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
KNOBS = (CAPTURE, LAYER_IDS, TAIL, PARTIAL, COLD, PEER_TOKENS, POOL)


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


class HfConfig(SimpleNamespace):
    def get_text_config(self):
        return self


def target_config(layers=8, **more):
    config = HfConfig(architectures=["Qwen3ForCausalLM"], num_hidden_layers=layers)
    vars(config).update(more)
    return SimpleNamespace(
        hf_config=config, hf_text_config=config, hidden_size=16, dtype=torch.bfloat16
    )


def draft_config(window=None, layer_ids=(0, 2, 4), mixed=False):
    config = HfConfig(
        architectures=["Qwen3DSparkModel"],
        num_hidden_layers=2,
        num_target_layers=8,
        block_size=4,
        markov_rank=8,
        markov_head_type="vanilla",
        dflash_config={"target_layer_ids": list(layer_ids), "mask_token_id": 0},
    )
    if window is not None:
        kinds = [
            "sliding_attention",
            "full_attention" if mixed else "sliding_attention",
        ]
        config.layer_types, config.sliding_window = kinds, window
    return config


def server_args(**more):
    return SimpleNamespace(
        **{
            "disaggregation_mode": "prefill",
            "disaggregation_transfer_backend": "nixl",
            "disaggregation_decode_enable_radix_cache": False,
            "speculative_algorithm": None,
            "speculative_draft_model_path": None,
            "speculative_draft_model_revision": None,
            "trust_remote_code": False,
            "pp_size": 1,
            **more,
        }
    )


class KnobCase(CustomTestCase):
    def setUp(self):
        kept = {k: v for k, v in os.environ.items() if k not in KNOBS}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(tails.activate, None)
        self.addCleanup(decode_side.forget_draft)

    def set_knobs(self, **values):
        names = dict(capture=CAPTURE, ids=LAYER_IDS, tail=TAIL, partial=PARTIAL)
        names.update(cold=COLD, peer_tokens=PEER_TOKENS, pool=POOL)
        os.environ.update({names[k]: str(v) for k, v in values.items()})

    @contextlib.contextmanager
    def drafts(self, config):
        with (
            mock.patch.object(handoff, "load_draft_config", lambda *_: config),
            mock.patch.object(startup, "load_draft_config", lambda *_: config),
        ):
            yield

    def refuse(self, pattern):
        return self.assertRaisesRegex(knobs.HandoffConfigError, pattern)


class TestKnobs(KnobCase):
    def test_declared_with_defaults(self):
        self.assertFalse(envs.SGLANG_DSPARK_PD_ENABLE_PREFILL_CAPTURE.get())
        self.assertEqual(tuple(envs.SGLANG_DSPARK_PD_TARGET_LAYER_IDS.get()), ())
        self.assertEqual(envs.SGLANG_DSPARK_PD_PREFILL_TAIL_TOKENS.get(), 8)
        self.assertFalse(envs.SGLANG_DSPARK_PD_ALLOW_PARTIAL_CONTEXT.get())
        self.assertEqual(envs.SGLANG_DSPARK_PD_PEER_NUM_DRAFT_TOKENS.get(), 0)

    def test_tail_lengths(self):
        self.assertEqual(knobs.read_tail_tokens(), 8)
        for good in ("-1", "1", " 31 ", "4096"):
            with self.subTest(good):
                self.set_knobs(tail=good)
                self.assertEqual(knobs.read_tail_tokens(), int(good))
        for bad in ("0", "-2", "4097", "many", ""):
            with self.subTest(bad), self.refuse(f"{TAIL}={bad!r}.*1 to 4096.*-1"):
                self.set_knobs(tail=bad)
                knobs.read_tail_tokens()

    def test_switches(self):
        """A typing error must not read as off, which starts an engine without rows."""
        reads = {
            CAPTURE: knobs.capture_enabled,
            PARTIAL: knobs.partial_context_allowed,
            COLD: knobs.cold_draft_allowed,
        }
        for name, read in reads.items():
            self.assertFalse(read())
            for good in ("1", "true", "YES", " y "):
                with self.subTest(name, good=good), mock.patch.dict(os.environ):
                    os.environ[name] = good
                    self.assertTrue(read())
            for bad in ("on", "enable", "2", ""):
                with self.subTest(name, bad=bad), mock.patch.dict(os.environ):
                    os.environ[name] = bad
                    with self.refuse(f"{name}={bad!r}: expected 1 or 0"):
                        read()

    def test_peer_draft_tokens(self):
        plain = target_config().hf_config
        self.addCleanup(setattr, knobs, "_peer_draft_tokens", 0)
        for bad in ("abc", "0", "1", "-3", ""):
            self.set_knobs(peer_tokens=bad)
            with self.subTest(bad), self.refuse(f"{PEER_TOKENS}={bad!r}"):
                knobs.expect_peer_draft_tokens(plain)
        self.set_knobs(peer_tokens=5)
        knobs.expect_peer_draft_tokens(plain)
        self.assertEqual(knobs.peer_draft_tokens(), 0)

    def test_layer_ids(self):
        bad = {
            "0,2,8": "layers are 0 to 7",
            "-1,2": "layers are 0 to 7",
            "2,2": "repeats a layer",
            "4,2": "ascending",
            "0,1,2,3,4,5,6,7,7": "names 9 layers of a target that has 8",
            "0,7": "layer 7 is the target's last",
        }
        for ids, reason in bad.items():
            with self.subTest(ids), self.refuse(f"{LAYER_IDS}={ids}.*{reason}"):
                knobs.check_layer_ids(
                    [int(i) for i in ids.split(",")], num_layers=8, last_layer_ok=False
                )
        knobs.check_layer_ids([0, 7], num_layers=8, last_layer_ok=True)
        self.set_knobs(ids="1,x")
        with self.refuse(f"{LAYER_IDS}='1,x'.*separated by commas"):
            knobs.read_layer_ids()


class TestSpecs(KnobCase):
    def prefill(self, target=None, **args):
        return handoff.resolve_prefill_spec(
            server_args(**args), target or target_config()
        )

    def test_both_engines_agree(self):
        """One number for the slot, whichever engine computes it."""
        self.set_knobs(tail=-1)
        draft = draft_config(window=32)
        decode = handoff.resolve_decode_spec(draft, target_config())
        with self.drafts(draft):
            prefill = self.prefill(speculative_draft_model_path="draft")
        self.assertEqual(prefill, decode)
        self.assertEqual(decode.tail_tokens, 31)
        self.assertEqual(decode.row_bytes, 3 * 16 * 2)
        self.assertEqual(decode.item_bytes, 64 + 31 * 96)

    def test_layer_ids_come_from(self):
        self.set_knobs(tail=4, partial=1)
        with self.refuse(f"{LAYER_IDS}.*--speculative-draft-model-path"):
            self.prefill()
        bundled = target_config(
            dspark_target_layer_ids=[1, 3],
            dspark_block_size=4,
            dspark_markov_rank=8,
            dspark_noise_token_id=0,
        )
        self.assertEqual(self.prefill(bundled).layer_ids, (1, 3))
        with self.drafts(draft_config()):
            spec = self.prefill(speculative_draft_model_path="draft")
        self.assertEqual(spec.layer_ids, (0, 2, 4))
        self.set_knobs(ids="0,5")
        self.assertEqual(self.prefill(bundled).layer_ids, (0, 5))

    def test_looped_target(self):
        """Each pass of a looped model's layers has an id of its own."""
        self.set_knobs(tail=4, ids="0,5,12")
        with self.refuse("layers are 0 to 7"):
            self.prefill()
        spec = self.prefill(target_config(num_loops=2))
        self.assertEqual(spec.layer_ids, (0, 5, 12))

    def test_decode_ids_are_the_drafts(self):
        self.set_knobs(tail=31, ids="0,1")
        with self.refuse(r"\(0, 1\) on decode.*\(0, 2, 4\).*Unset"):
            handoff.resolve_decode_spec(draft_config(window=32), target_config())

    def test_partial_context_needs_consent(self):
        """The message must name the variable that accepts the loss."""
        cases = (
            (draft_config(), 8, "the whole prompt.*DSPARK on prefill"),
            (draft_config(window=32), 30, f"31 rows.*{TAIL}=-1"),
            (draft_config(window=32, mixed=True), 31, "the whole prompt"),
        )
        for draft, tail, reason in cases:
            self.set_knobs(tail=tail)
            os.environ.pop(PARTIAL, None)
            with self.subTest(reason), self.refuse(f"{reason}.*{PARTIAL}=1"):
                handoff.resolve_decode_spec(draft, target_config())
            self.set_knobs(partial=1)
            spec = handoff.resolve_decode_spec(draft, target_config())
            self.assertEqual(spec.tail_tokens, tail)

    def test_auto_needs_a_window(self):
        self.set_knobs(tail=-1, ids="0,1")
        with self.refuse("knows no draft"):
            self.prefill()
        with self.refuse("attends to the whole prompt.*" + PARTIAL):
            os.environ.pop(LAYER_IDS)
            handoff.resolve_decode_spec(draft_config(), target_config())
        with self.refuse("needs 9999 rows; the limit is 4096"):
            handoff.resolve_decode_spec(draft_config(window=10000), target_config())

    def test_slot_has_a_limit(self):
        self.set_knobs(tail=4096, partial=1)
        wide = target_config()
        wide.hidden_size = 8192
        with self.refuse("bytes for one request; the limit is"):
            handoff.resolve_decode_spec(draft_config(), wide)

    def test_fingerprint_tells_rows_apart(self):
        self.set_knobs(tail=4, partial=1)
        marks = set()
        for ids in ((0, 1), (0, 2), (0, 1, 2)):
            draft = draft_config(layer_ids=ids)
            for dtype in (torch.bfloat16, torch.float32):
                target = target_config()
                target.dtype = dtype
                marks.add(handoff.resolve_decode_spec(draft, target).fingerprint)
        self.assertEqual(len(marks), 6)
        self.assertTrue(all(0 < mark < 1 << 63 for mark in marks))


class TestDescriptions(KnobCase):
    def test_tail(self):
        self.set_knobs(tail=-1, capture=1)
        with self.drafts(draft_config(window=32)):
            args = server_args(speculative_draft_model_path="draft")
            prefill = handoff.describe_prefill(args, target_config())
            args.speculative_algorithm, args.disaggregation_mode = "DSPARK", "decode"
            decode = handoff.describe_decode(args, target_config())
        self.assertEqual(prefill, decode)
        self.assertEqual(prefill["mode"], "tail")
        self.assertEqual((prefill["tail_tokens"], prefill["window_need"]), (31, 31))

    def test_native_and_none(self):
        with self.drafts(draft_config()):
            args = server_args(speculative_draft_model_path="draft")
            self.assertIsNone(handoff.describe_prefill(args, target_config()))
            self.assertIsNone(handoff.describe_decode(args, target_config()))
            args.speculative_algorithm = "DSPARK"
            for describe in (handoff.describe_prefill, handoff.describe_decode):
                found = describe(args, target_config())
                self.assertEqual(found["mode"], "native")
                self.assertEqual(found["layer_ids"], [0, 2, 4])


class TestRefusals(KnobCase):
    def check(self, draft=None, **args):
        record = server_args(**args)
        config = "sglang.srt.arg_groups.overrides.model_config_of"
        with (
            self.drafts(draft or draft_config(window=32)),
            mock.patch(config, lambda _: target_config()),
        ):
            startup.validate_server_args(record)

    def test_argument_checks_call_it(self):
        """Without the call every refusal below would reach the first request."""
        self.set_knobs(capture=1, tail=0, ids="0,1")
        with (
            self.refuse(TAIL),
            mock.patch(
                "sglang.srt.arg_groups.overrides.model_config_of",
                lambda _: target_config(),
            ),
        ):
            validation_hook.check_server_args(server_args())

    def test_capture_belongs_to_prefill(self):
        self.set_knobs(capture=1, ids="0,1")
        with self.refuse("decode engine.*set it on the prefill"):
            self.check(disaggregation_mode="decode")
        with self.refuse("a server of its own"):
            self.check(disaggregation_mode="null")
        for algorithm in ("DSPARK", "EAGLE"):
            with self.refuse(f"--speculative-algorithm {algorithm}"):
                self.check(speculative_algorithm=algorithm)

    def test_prefill_combinations(self):
        self.set_knobs(capture=1, ids="0,1")
        refused = {
            "enable_return_aux_hidden_states": True,
            "enable_return_hidden_states": True,
            "return_hidden_states_mode": "last",
            "attn_cp_size": 2,
            "enable_kv_cache_sharding": True,
            "enable_two_batch_overlap": True,
            "enable_pdmux": True,
            "enable_streaming_session": True,
            "enable_pd_role_switch": True,
            "disaggregation_transfer_backend": "mori",
        }
        self.check()
        for field, value in refused.items():
            flag = field.replace("_", "-")
            with self.subTest(field), self.refuse(flag):
                self.check(**{field: value})

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
        """Whichever flag asks for them: a replayed stage has no rows of earlier ones."""
        self.set_knobs(capture=1, ids="0,1")
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

    def test_decode_combinations(self):
        self.set_knobs(tail=-1)
        decode = dict(
            disaggregation_mode="decode",
            speculative_algorithm="DSPARK",
            speculative_draft_model_path="draft",
        )
        self.check(**decode)
        self.check(**decode, disaggregation_decode_enable_radix_cache=True)
        refused = {
            "dcp_size": 2,
            "enable_hisparse": True,
            "enable_unified_memory": True,
            "enable_hierarchical_cache": True,
            "disaggregation_decode_host_receive_threshold": 0.5,
            "disaggregation_transfer_backend": "ascend",
        }
        for field, value in refused.items():
            with self.subTest(field), self.refuse(field.replace("_", "-")):
                self.check(**{**decode, field: value})
        self.set_knobs(tail=8, partial=1)
        self.check(**decode)
        with self.refuse("--disaggregation-decode-enable-radix-cache"):
            self.check(**decode, disaggregation_decode_enable_radix_cache=True)

    def test_mooncake_over_tcp(self):
        self.set_knobs(capture=1, ids="0,1")
        self.check(disaggregation_transfer_backend="mooncake")
        with (
            envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(True),
            self.refuse("over TCP"),
        ):
            self.check(disaggregation_transfer_backend="mooncake")

    def test_mooncake_pool_over_tcp(self):
        self.set_knobs(capture=1, ids="0,1")
        for pool in ("true", "True", "TRUE", "NVLINK"):
            self.set_knobs(pool=pool)
            with self.subTest(pool), self.refuse(f"over TCP.*{POOL}"):
                self.check(disaggregation_transfer_backend="mooncake")
            self.check()
        self.set_knobs(pool="BAREX")
        self.check(disaggregation_transfer_backend="mooncake")

    def test_metadata_in_device_memory(self):
        decode = dict(
            disaggregation_mode="decode",
            speculative_algorithm="DSPARK",
            speculative_draft_model_path="draft",
        )
        self.set_knobs(pool="INTRA_NODE_NVLINK")
        self.check(**decode)
        for backend in ("mooncake", "nixl"):
            self.set_knobs(tail=-1)
            with self.subTest(backend), self.refuse(f"{POOL}=INTRA_NODE_NVLINK"):
                self.check(**decode, disaggregation_transfer_backend=backend)
            os.environ.pop(TAIL)
            with mock.patch.dict(os.environ), self.subTest(backend, role="prefill"):
                self.set_knobs(capture=1, ids="0,1")
                with self.refuse(f"{POOL}=INTRA_NODE_NVLINK"):
                    self.check(disaggregation_transfer_backend=backend)

    def test_knobs_without_their_switch(self):
        """The engine would start, hand over nothing and say nothing."""
        self.set_knobs(ids="0,1")
        for mode in ("prefill", "decode", "null"):
            with self.subTest(mode), self.refuse(f"{LAYER_IDS} set without {CAPTURE}"):
                self.check(disaggregation_mode=mode)
        os.environ.pop(LAYER_IDS)
        self.set_knobs(tail=4)
        with self.refuse(f"{TAIL} set without {CAPTURE}"):
            self.check()
        self.check(disaggregation_mode="null")

    def test_cold_draft_with_shared_slots(self):
        self.set_knobs(cold=1)
        decode = dict(disaggregation_mode="decode", speculative_algorithm="DSPARK")
        self.check(**decode)
        with self.refuse(f"radix-cache.*{COLD}"):
            self.check(**decode, disaggregation_decode_enable_radix_cache=True)

    def test_silent_without_knobs(self):
        self.check(disaggregation_mode="decode", speculative_algorithm="DSPARK")
        self.check(enable_two_batch_overlap=True)
        self.check(disaggregation_mode="null")


class TestCaptureConfig(KnobCase):
    def resolve(self, is_draft_worker=False):
        features = SimpleNamespace(aux_hidden_state_capture=None)
        exec_config = SimpleNamespace(features=features)
        with mock.patch.object(spec_aux_hidden_state, "get_exec", lambda: exec_config):
            return spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
                server_args=server_args(),
                model_config=target_config(),
                spec_algorithm=SpeculativeAlgorithm.NONE,
                is_draft_worker=is_draft_worker,
            )

    def test_runner_is_told_the_layers(self):
        self.assertFalse(self.resolve().dflash_use_aux_hidden_state)
        self.set_knobs(capture=1, ids="0,2,4")
        config = self.resolve()
        self.assertTrue(config.dflash_use_aux_hidden_state and config.is_dspark)
        self.assertEqual(config.dflash_target_layer_ids, [0, 2, 4])
        self.assertIsNone(config.dflash_draft_num_layers)
        self.assertFalse(self.resolve(is_draft_worker=True).dflash_use_aux_hidden_state)

    def test_forward_keeps_all_rows(self):
        self.set_knobs(capture=1)
        self.assertEqual(get_server_return_hidden_states_mode(), CaptureHiddenMode.FULL)

    def test_client_rows_refused(self):
        knobs.refuse_client_rows(CaptureHiddenMode.FULL)
        self.set_knobs(capture=1)
        knobs.refuse_client_rows(CaptureHiddenMode.NULL)
        with self.assertRaisesRegex(ValueError, "returns none to clients"):
            self.ask_for_rows()

    def ask_for_rows(self):
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        manager = object.__new__(TokenizerManager)
        manager._validate_token_ids_logprob = lambda _: None
        manager._validate_joint_schema_request = lambda *_: None
        manager.validate_total_tokens = False
        manager.context_len, manager.num_reserved_tokens = 100, 0
        manager.allow_auto_truncate = manager.is_generation = True
        request = GenerateReqInput(
            input_ids=[1], sampling_params={}, return_hidden_states=True
        )
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        config = "sglang.srt.managers.tokenizer_manager.get_exec"
        with mock.patch(config, lambda: SimpleNamespace(features=features)):
            manager._validate_one_request(request, [1])


class TestAttach(KnobCase):
    """What a scheduler gets when its metadata buffers exist."""

    def scheduler(self, **args):
        return SimpleNamespace(
            server_args=server_args(**args),
            model_config=target_config(),
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def buffers(self):
        return SimpleNamespace(bootstrap_room=torch.zeros(1))

    def attach(self, scheduler, last=True):
        buffers = self.buffers()
        group = SimpleNamespace(is_last_rank=last)
        parallel = "sglang.srt.runtime_context.get_parallel"
        with mock.patch(parallel, lambda: SimpleNamespace(pp_group=group)):
            startup.attach_tail_buffer(scheduler, buffers, 4)
        return getattr(buffers, "dspark_tail", None)

    def test_last_stage_only(self):
        self.set_knobs(capture=1, ids="0,1", tail=3)
        tail = self.attach(self.scheduler())
        self.assertEqual(tuple(tail.rows.shape), (4, 3, 32))
        self.assertIs(tails.active_tail(), tail)
        self.assertIsNone(self.attach(self.scheduler(), last=False))
        self.assertEqual(tails.cap_prefix_match(19, 20), 17)

    def test_other_engines_get_nothing(self):
        self.assertIsNone(self.attach(self.scheduler()))
        self.assertIsNone(tails.active_tail())

    def test_memory_is_checked(self):
        self.set_knobs(capture=1, ids="0,1", tail=4)
        available = SimpleNamespace(available=100)
        with mock.patch("psutil.virtual_memory", lambda: available):
            with self.refuse("--max-running-requests"):
                self.attach(self.scheduler())

    def decode(self, captured=(0, 2, 4), pool=None, **args):
        scheduler = self.scheduler(
            disaggregation_mode="decode", speculative_algorithm="DSPARK", **args
        )
        scheduler.spec_algorithm = SpeculativeAlgorithm.DSPARK
        runner = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=draft_config(window=32))
        )
        aux = SimpleNamespace(dflash_target_layer_ids=list(captured))
        scheduler.draft_worker = SimpleNamespace(
            draft_model_runner=runner,
            primary_draft_kv_pool=pool,
            model_runner=SimpleNamespace(spec_aux_config=aux),
        )
        return scheduler

    def test_decode_expects_a_tail_when_told(self):
        """Without the knob a decode keeps upstream's metadata."""
        self.assertIsNone(self.attach(self.decode()))
        self.set_knobs(tail=-1)
        self.assertEqual(self.attach(self.decode()).spec.tail_tokens, 31)
        self.assertEqual(tails.cap_prefix_match(19, 20), 19)

    def test_decode_looks_after_its_draft(self):
        """With and without a tail: slots that nobody wrote, shared or renumbered."""
        cases = (
            ({}, False, True),
            ({"disaggregation_decode_enable_radix_cache": True}, True, True),
            ({"dcp_size": 2}, False, False),
            ({"enable_hisparse": True}, False, False),
        )
        for args, shares, plain in cases:
            with self.subTest(args):
                self.attach(self.decode(**args))
                draft = decode_side._draft
                self.assertEqual(draft.window_need, 31)
                self.assertEqual(
                    (draft.shares_slots, draft.plain_slots), (shares, plain)
                )

    def test_partial_tail_needs_a_pool_that_can_be_cleared(self):
        """Else the first request would raise in the scheduler's loop."""
        self.set_knobs(tail=4, partial=1)
        with self.refuse("keeps no row per token slot"):
            self.attach(self.decode())
        rows = SimpleNamespace(k_buffer=[], v_buffer=[])
        masked = SimpleNamespace(set_swa_valid_from=None)
        for pool in (rows, masked):
            self.assertIsNotNone(self.attach(self.decode(pool=pool)))

    def test_remapped_layers_are_refused(self):
        self.set_knobs(tail=-1)
        with self.refuse(r"\(0, 2, 4\).*maps them to \(1, 3, 5\)"):
            self.attach(self.decode(captured=(1, 3, 5)))


if __name__ == "__main__":
    unittest.main()
