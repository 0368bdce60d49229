"""Captured hidden states cross pipeline stages in order, and only where they are owned.

Stages are run one after the other in this process, with SGLang's own capture list,
stage exit, stage entry and logits processor between them.
"""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
from sglang.srt.layers.layer_boundary.stage import StageBoundary
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode, PPProxyTensors
from sglang.srt.model_executor.model_runner_components import attention_backend_setup
from sglang.srt.model_executor.model_runner_components.misc_utils import (
    resolve_pp_proxy_dspark_hidden_size,
)
from sglang.srt.speculative.dspark_components import pp_aux_capture
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

TOKENS, HIDDEN = 3, 4


class Inner:
    def __init__(self, start, end):
        self.start_layer, self.end_layer = start, end
        self.layers_to_capture = []


class MoeInner(Inner):
    """Marks layer objects, as mixture models do."""

    def __init__(self, start, end):
        super().__init__(start, end)
        self.layers = [
            SimpleNamespace() if start <= i < end else None for i in range(8)
        ]

    def set_dflash_layers_to_capture(self, points):
        self.layers_to_capture = points
        for point in points:
            self.layers[point].marked = True


def make_model(start, end, inner=Inner, name="Qwen3ForCausalLM", size=2):
    """One of ``size`` stages of a model with 8 layers."""
    model = type(name, (), {})()
    model.pp_group = SimpleNamespace(world_size=size, is_last_rank=end == 8)
    model.model = inner(start, end)
    model.config = SimpleNamespace(hidden_size=HIDDEN)
    model.capture_aux_hidden_states = False
    return model


class CaptureCase(CustomTestCase):
    def setUp(self):
        self.addCleanup(pp_aux_capture.keep, None)
        pp_aux_capture.keep(None)

    def configure(self, model, layer_ids):
        attention_backend_setup.configure_aux_hidden_state_capture(
            model=model,
            eagle_use_aux_hidden_state=False,
            eagle_aux_hidden_state_layer_ids=None,
            dflash_use_aux_hidden_state=True,
            dflash_target_layer_ids=layer_ids,
            is_dspark=True,
        )


class TestConfigure(CaptureCase):
    def test_runner_divides_layers(self):
        """Layer 3 is stage 0's last; its output is taken by stage 1."""
        first, last = make_model(0, 4), make_model(4, 8)
        for model in (first, last):
            self.configure(model, [0, 2, 3, 6])
        self.assertEqual(first.model.layers_to_capture, [1, 3])
        self.assertEqual(last.model.layers_to_capture, [4, 7])
        self.assertFalse(first.capture_aux_hidden_states)
        self.assertTrue(last.capture_aux_hidden_states)

    def test_last_stage_without_captures_returns_one_tensor(self):
        """Unpacking its tensor as a pair would even succeed with two tokens."""
        last = make_model(4, 8)
        self.configure(last, [0, 1])
        self.assertFalse(last.capture_aux_hidden_states)
        self.assertEqual(pp_aux_capture.proxy_width(last), 2 * HIDDEN)

    def test_mixture_marks_its_own_layers_only(self):
        """Marking a layer of another stage would touch a placeholder."""
        model = make_model(4, 8, MoeInner, "Qwen3MoeForCausalLM")
        self.configure(model, [0, 2, 3, 6])
        marked = [i for i, layer in enumerate(model.model.layers) if vars_of(layer)]
        self.assertEqual(marked, [4, 7])

    def test_every_layer_is_captured_once(self):
        ids = [0, 1, 3, 4, 6]
        for bounds in ([0, 8], [0, 4, 8], [0, 3, 5, 8], [0, 1, 2, 7, 8]):
            with self.subTest(bounds=bounds):
                parts = [
                    pp_aux_capture.owned_layers(ids, start, end)
                    for start, end in zip(bounds, bounds[1:], strict=False)
                ]
                self.assertEqual([p - 1 for part in parts for p in part], ids)

    def test_graph_inputs_are_sized(self):
        """Keys that were not preallocated are dropped by graph runners."""
        middle = make_model(3, 5)
        self.configure(middle, [0, 1, 3])
        # The outputs of layers 0 and 1; layer 3 is taken by this stage itself.
        width = resolve_pp_proxy_dspark_hidden_size(model=middle, pp_size=3, pp_rank=1)
        self.assertEqual(width, 2 * HIDDEN)
        self.assertEqual(
            resolve_pp_proxy_dspark_hidden_size(
                model=make_model(3, 5), pp_size=3, pp_rank=1
            ),
            0,
        )

    def test_unknown_model_is_refused(self):
        model = make_model(0, 4, name="OtherForCausalLM")
        with self.assertRaisesRegex(ValueError, "OtherForCausalLM.*--pp-size 1"):
            self.configure(model, [0])

    def test_unknown_model_captures_all_on_its_last_stage(self):
        """As SGLang serves it: nothing has to cross."""
        for start, end in ((0, 4), (4, 8)):
            model = make_model(start, end, name="OtherForCausalLM")
            model.config.num_hidden_layers = 8
            model.set_dspark_layers_to_capture = mock.Mock()
            self.configure(model, [3, 6])
            model.set_dspark_layers_to_capture.assert_called_once_with([3, 6])
            with self.assertRaisesRegex(ValueError, "OtherForCausalLM"):
                self.configure(model, [2, 6])

    def test_one_stage_uses_the_models_setter(self):
        """SGLang's capture, which asks for no parallel config, is left alone."""
        bare = SimpleNamespace(set_dspark_layers_to_capture=mock.Mock())
        self.configure(bare, [0, 2])
        bare.set_dspark_layers_to_capture.assert_called_once_with([0, 2])
        model = make_model(0, 8, size=1)
        model.set_dflash_layers_to_capture = mock.Mock()
        self.configure(model, [0, 2])
        model.set_dflash_layers_to_capture.assert_called_once_with([0, 2])
        self.assertIsNone(pp_aux_capture.share())

    def test_model_that_carries_them_itself(self):
        model = make_model(0, 4)
        model.get_pp_proxy_dspark_hidden_size = lambda: 0
        model.set_dspark_layers_to_capture = mock.Mock()
        self.configure(model, [0, 2])
        model.set_dspark_layers_to_capture.assert_called_once_with([0, 2])


def vars_of(layer):
    return vars(layer) if layer is not None else {}


def layer_output(layer_id):
    return torch.full((TOKENS, HIDDEN), float(layer_id))


def make_batch(mode=ForwardMode.EXTEND, **more):
    return SimpleNamespace(residual_stream=None, forward_mode=mode, **more)


def fresh_stream(batch):
    """The residual stream as the first stage's layers leave it."""
    zeros = torch.zeros(TOKENS, HIDDEN)
    hidden, batch.residual_stream = ResidualStream.from_handoff(
        zeros, zeros.clone(), PLAIN_ADD
    )
    return hidden


def expect_layers(received, own):
    share = pp_aux_capture.StageShare(received * HIDDEN, (received + own) * HIDDEN)
    pp_aux_capture.keep(share)


def run_body(start, end, layer_ids, proxy, batch):
    """One stage's body as the models write it: list, entry and layers."""
    own = pp_aux_capture.owned_layers(layer_ids, start, end)
    if pp_aux_capture.share() is not None:
        expect_layers(sum(1 for i in layer_ids if i + 1 < start), len(own))
    if proxy is None:
        hidden = fresh_stream(batch)
    else:
        boundary = object.__new__(StageBoundary)
        boundary.declaration = SimpleNamespace(previous=None)
        hidden = boundary.from_pp(proxy, batch)
    captured = AuxHiddenStateList()
    for point in own:
        captured.capture(layer_output(point - 1))
    return hidden, captured or None


def run_stage(start, end, layer_ids, proxy, last):
    """One stage's body and its exit or return."""
    batch = make_batch()
    hidden, aux = run_body(start, end, layer_ids, proxy, batch)
    if not last:
        return residual_batch.to_pp(hidden, batch)
    return pp_aux_capture.merge(aux, batch)


class TestStages(CaptureCase):
    def run_pipeline(self, bounds, layer_ids):
        proxy = None
        pairs = list(zip(bounds, bounds[1:], strict=False))
        for start, end in pairs:
            proxy = run_stage(start, end, layer_ids, proxy, last=end == bounds[-1])
        return torch.cat(list(proxy), dim=-1)

    def test_two_stages_equal_one(self):
        expect_layers(0, 0)
        for layer_ids in ([0, 1, 2], [0, 2, 6], [0], [6], [3, 4]):
            expected = torch.cat([layer_output(i) for i in layer_ids], dim=-1)
            for bounds in ([0, 4, 8], [0, 3, 5, 8], [0, 1, 2, 7, 8]):
                with self.subTest(layer_ids=layer_ids, bounds=bounds):
                    states = self.run_pipeline(bounds, layer_ids)
                    torch.testing.assert_close(states, expected)

    def test_they_travel_under_the_key_graphs_know(self):
        expect_layers(0, 0)
        proxy = run_stage(0, 4, [0, 1], None, last=False)
        self.assertEqual(
            tuple(proxy.tensors["dspark_hidden_states"].shape), (TOKENS, 2 * HIDDEN)
        )

    def test_dummy_runs_bring_nothing(self):
        """A dummy proxy has none; the width stays, on every kind of stage."""
        expect_layers(0, 0)
        zeros = torch.zeros(TOKENS, HIDDEN)
        for ids, own in (([0, 6], [6]), ([0], [])):
            for last in (True, False):
                with self.subTest(ids=ids, last=last):
                    proxy = PPProxyTensors(
                        {"hidden_states": zeros, "residual": zeros.clone()}
                    )
                    out = run_stage(4, 8, ids, proxy, last=last)
                    states = (
                        torch.cat(list(out), dim=-1)
                        if last
                        else out.tensors[pp_aux_capture.PROXY_KEY]
                    )
                    expected = [zeros] + [layer_output(i) for i in own]
                    torch.testing.assert_close(states, torch.cat(expected, dim=-1))

    def test_other_engines_exchange_nothing(self):
        proxy = run_stage(0, 4, [0, 1], None, last=False)
        self.assertNotIn(pp_aux_capture.PROXY_KEY, proxy.tensors)

    def test_stage_without_its_captures_sends_nothing(self):
        """What an earlier forward captured must not be taken for this one's."""
        expect_layers(0, 0)
        run_stage(0, 4, [0, 1], None, last=False)
        batch = make_batch()
        with self.assertRaisesRegex(RuntimeError, "holds 0 captured.*expected 8"):
            residual_batch.to_pp(fresh_stream(batch), batch)

    def replay(self, layer_ids):
        """A last stage as a prefill graph replays it: the body ran on another batch."""
        expect_layers(0, 0)
        proxy = run_stage(0, 4, layer_ids, None, last=False)
        _, aux = run_body(4, 8, layer_ids, proxy, make_batch())
        return pp_aux_capture.merge(aux, make_batch())

    def test_what_is_kept_with_another_batch_is_missed(self):
        with self.assertRaisesRegex(RuntimeError, "holds 4 captured.*expected 12"):
            self.replay([0, 1, 6])

    def test_one_layer_is_not_replaced_by_final_states(self):
        """Final hidden states are as wide as the one layer an earlier stage has."""
        with self.assertRaisesRegex(RuntimeError, "holds 0 captured.*expected 4"):
            self.replay([1])

    def test_idle_rank_of_dp_attention(self):
        """Without padding it has no tokens, and a model may capture nothing."""
        expect_layers(1, 1)
        states = torch.zeros(0, HIDDEN)
        batch = make_batch(ForwardMode.IDLE, dspark_received=states)
        self.assertEqual(len(pp_aux_capture.merge(None, batch)), 1)
        expect_layers(0, 1)
        self.assertIsNone(pp_aux_capture.merge(None, make_batch(ForwardMode.IDLE)))
        empty, batch = torch.zeros(0, HIDDEN), make_batch(ForwardMode.IDLE)
        hidden, batch.residual_stream = ResidualStream.from_handoff(
            empty, empty.clone(), PLAIN_ADD
        )
        proxy = residual_batch.to_pp(hidden, batch)
        self.assertNotIn(pp_aux_capture.PROXY_KEY, proxy.tensors)

    def test_padded_rank_of_dp_attention(self):
        """A rank that runs dummy tokens sends and joins as many as it runs."""
        expect_layers(0, 0)
        proxy = run_stage(0, 4, [0, 6], None, last=False)
        batch = make_batch()
        _, aux = run_body(4, 8, [0, 6], proxy, batch)
        batch.forward_mode = ForwardMode.IDLE
        states = pp_aux_capture.merge(aux, batch)
        self.assertEqual([part.shape[0] for part in states], [TOKENS, TOKENS])

    def test_packed_and_missing_own_layers(self):
        batch = make_batch(dspark_received=layer_output(0))
        expect_layers(1, 1)
        packed = pp_aux_capture.merge(layer_output(5), batch)
        self.assertEqual([int(part[0, 0]) for part in packed], [0, 5])
        expect_layers(1, 0)
        alone = pp_aux_capture.merge(None, batch)
        self.assertEqual(len(alone), 1)

    def test_stages_of_other_token_counts_are_refused(self):
        expect_layers(1, 1)
        batch = make_batch(dspark_received=torch.zeros(2, HIDDEN))
        with self.assertRaisesRegex(RuntimeError, r"\[2, 3\]"):
            pp_aux_capture.merge([layer_output(1)], batch)

    def test_logits_processor_sees_all_layers(self):
        expect_layers(1, 1)
        seen = []
        processor = object.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        processor.expected_aux_hidden_states = 2
        processor._check_aux_hidden_states = lambda aux, *_: seen.append(aux) or stop()
        metadata = make_batch(dspark_received=layer_output(0))
        hidden = torch.zeros(TOKENS, HIDDEN)
        gather = "sglang.srt.layers.logits_processor.layernorm_sp.maybe_exit_gather"
        with mock.patch(gather, lambda **_: (hidden, None)), self.assertRaises(Stop):
            processor.forward(None, hidden, None, metadata, [layer_output(5)])
        self.assertEqual([int(part[0, 0]) for part in seen[0]], [0, 5])


class Stop(Exception):
    pass


def stop():
    raise Stop


if __name__ == "__main__":
    unittest.main()
