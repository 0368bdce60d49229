"""Captured rows cross pipeline stages in order, and only where they are owned.

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
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.model_runner_components import attention_backend_setup
from sglang.srt.model_executor.model_runner_components.misc_utils import (
    resolve_pp_proxy_dspark_hidden_size,
)
from sglang.srt.speculative.dspark_components import pp_aux_capture
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

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


def make_model(start, end, inner=Inner, name="Qwen3ForCausalLM"):
    model = type(name, (), {})()
    model.model = inner(start, end)
    model.config = SimpleNamespace(hidden_size=HIDDEN)
    model.capture_aux_hidden_states = False
    return model


def stage_of(rank, size):
    group = SimpleNamespace(is_last_rank=rank == size - 1)
    return mock.patch(
        "sglang.srt.runtime_context.get_parallel",
        lambda: SimpleNamespace(pp_size=size, pp_rank=rank, pp_group=group),
    )


class CaptureCase(CustomTestCase):
    def setUp(self):
        self.addCleanup(self.reset)
        self.reset()

    def reset(self):
        pp_aux_capture._Forward.enabled = False
        pp_aux_capture._Forward.captured = None

    def configure(self, model, layer_ids, rank, size):
        with stage_of(rank, size):
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
        for rank, model in enumerate((first, last)):
            self.configure(model, [0, 2, 3, 6], rank, 2)
        self.assertEqual(first.model.layers_to_capture, [1, 3])
        self.assertEqual(last.model.layers_to_capture, [4, 7])
        self.assertFalse(first.capture_aux_hidden_states)
        self.assertTrue(last.capture_aux_hidden_states)

    def test_last_stage_without_captures_returns_one_tensor(self):
        """Unpacking its tensor as a pair would even succeed with two rows."""
        last = make_model(4, 8)
        self.configure(last, [0, 1], 1, 2)
        self.assertFalse(last.capture_aux_hidden_states)
        self.assertEqual(pp_aux_capture.proxy_width(last), 2 * HIDDEN)

    def test_mixture_marks_its_own_layers_only(self):
        """Marking a layer of another stage would touch a placeholder."""
        model = make_model(4, 8, MoeInner, "Qwen3MoeForCausalLM")
        self.configure(model, [0, 2, 3, 6], 1, 2)
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
        self.configure(middle, [0, 1, 3], 1, 3)
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
            self.configure(model, [0], 0, 2)

    def test_one_stage_uses_the_models_setter(self):
        model = make_model(0, 8)
        model.set_dflash_layers_to_capture = mock.Mock()
        self.configure(model, [0, 2], 0, 1)
        model.set_dflash_layers_to_capture.assert_called_once_with([0, 2])

    def test_model_that_carries_rows_itself(self):
        model = make_model(0, 4)
        model.get_pp_proxy_dspark_hidden_size = lambda: 0
        model.set_dspark_layers_to_capture = mock.Mock()
        self.configure(model, [0, 2], 0, 2)
        model.set_dspark_layers_to_capture.assert_called_once_with([0, 2])


def vars_of(layer):
    return vars(layer) if layer is not None else {}


def layer_output(layer_id):
    return torch.full((TOKENS, HIDDEN), float(layer_id))


def fresh_stream(batch):
    """The residual stream as the first stage's layers leave it."""
    zeros = torch.zeros(TOKENS, HIDDEN)
    hidden, batch.residual_stream = ResidualStream.from_handoff(
        zeros, zeros.clone(), PLAIN_ADD
    )
    return hidden


def run_stage(start, end, layer_ids, proxy, last):
    """One stage as the models write it: list, entry, layers, exit or return."""
    batch = SimpleNamespace(residual_stream=None)
    if proxy is None:
        hidden = fresh_stream(batch)
    else:
        boundary = object.__new__(StageBoundary)
        boundary.declaration = SimpleNamespace(previous=None)
        hidden = boundary.from_pp(proxy, batch)
    captured = AuxHiddenStateList()
    for point in pp_aux_capture.owned_layers(layer_ids, start, end):
        captured.capture(layer_output(point - 1))
    if not last:
        return residual_batch.to_pp(hidden, batch)
    aux = captured or None
    return pp_aux_capture.merge(aux, batch)


class TestStages(CaptureCase):
    def run_pipeline(self, bounds, layer_ids):
        proxy = None
        pairs = list(zip(bounds, bounds[1:], strict=False))
        for start, end in pairs:
            proxy = run_stage(start, end, layer_ids, proxy, last=end == bounds[-1])
        return torch.cat(list(proxy), dim=-1)

    def test_two_stages_equal_one(self):
        pp_aux_capture._Forward.enabled = True
        for layer_ids in ([0, 1, 2], [0, 2, 6], [0], [6], [3, 4]):
            expected = torch.cat([layer_output(i) for i in layer_ids], dim=-1)
            for bounds in ([0, 4, 8], [0, 3, 5, 8], [0, 1, 2, 7, 8]):
                with self.subTest(layer_ids=layer_ids, bounds=bounds):
                    rows = self.run_pipeline(bounds, layer_ids)
                    torch.testing.assert_close(rows, expected)

    def test_rows_travel_under_the_key_graphs_know(self):
        pp_aux_capture._Forward.enabled = True
        proxy = run_stage(0, 4, [0, 1], None, last=False)
        self.assertEqual(
            tuple(proxy.tensors["dspark_hidden_states"].shape), (TOKENS, 2 * HIDDEN)
        )

    def test_dummy_runs_bring_no_rows(self):
        pp_aux_capture._Forward.enabled = True
        zeros = torch.zeros(TOKENS, HIDDEN)
        proxy = PPProxyTensors({"hidden_states": zeros, "residual": zeros.clone()})
        aux = run_stage(4, 8, [0, 6], proxy, last=True)
        self.assertEqual(len(aux), 1)

    def test_other_engines_exchange_nothing(self):
        proxy = run_stage(0, 4, [0, 1], None, last=False)
        self.assertNotIn(pp_aux_capture.PROXY_KEY, proxy.tensors)
        self.assertIsNone(pp_aux_capture._Forward.captured)

    def test_lists_of_an_earlier_forward_are_not_sent(self):
        pp_aux_capture._Forward.enabled = True
        run_stage(0, 4, [0, 1], None, last=False)
        batch = SimpleNamespace(residual_stream=None)
        proxy = residual_batch.to_pp(fresh_stream(batch), batch)
        self.assertNotIn(pp_aux_capture.PROXY_KEY, proxy.tensors)

    def test_packed_and_missing_own_rows(self):
        pp_aux_capture._Forward.enabled = True
        batch = SimpleNamespace(dspark_rows_received=layer_output(0))
        packed = pp_aux_capture.merge(layer_output(5), batch)
        self.assertEqual([int(part[0, 0]) for part in packed], [0, 5])
        alone = pp_aux_capture.merge(None, batch)
        self.assertEqual(len(alone), 1)

    def test_stages_of_other_token_counts_are_refused(self):
        pp_aux_capture._Forward.enabled = True
        batch = SimpleNamespace(dspark_rows_received=torch.zeros(2, HIDDEN))
        with self.assertRaisesRegex(RuntimeError, r"\[2, 3\]"):
            pp_aux_capture.merge([layer_output(1)], batch)

    def test_logits_processor_sees_all_rows(self):
        pp_aux_capture._Forward.enabled = True
        seen = []
        processor = object.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        processor.expected_aux_hidden_states = 2
        processor._check_aux_hidden_states = lambda aux, *_: seen.append(aux) or stop()
        metadata = SimpleNamespace(
            dspark_rows_received=layer_output(0), forward_mode=None
        )
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
