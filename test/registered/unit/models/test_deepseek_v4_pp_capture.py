"""A DeepSeek-V4 target's captured hidden states over pipeline stages, as far as a CPU goes.

The model itself needs CUDA kernels; what is pinned here is the division of layers, the
packed states between stages, and where the model calls in.
"""

from __future__ import annotations

import inspect
import unittest
from types import SimpleNamespace

import torch

from sglang.srt.layers.aux_hidden_states import AuxHiddenStatePacker
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model
from sglang.srt.speculative.dspark_components import pp_aux_capture as capture
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

TOKENS, HIDDEN, LAYERS = 3, 4, 8


def make_stage(start, end, last):
    inner = SimpleNamespace(
        start_layer=start,
        end_layer=end,
        hidden_size=HIDDEN,
        dspark_layers_to_capture=None,
    )
    return SimpleNamespace(
        model=inner,
        config=SimpleNamespace(hidden_size=HIDDEN),
        pp_group=SimpleNamespace(is_last_rank=last),
        capture_aux_hidden_states=False,
    )


def divide(stage, layer_ids, pp_size=2):
    stage.pp_group.world_size = pp_size
    DeepseekV4ForCausalLM.set_dspark_layers_to_capture(stage, layer_ids)
    return stage


class TestDivide(CustomTestCase):
    def test_setter_divides_layers(self):
        """A layer's own stage captures it, the target's last layer included."""
        first, last = make_stage(0, 4, False), make_stage(4, 8, True)
        for stage in (first, last):
            divide(stage, [1, 3, 7])
        self.assertEqual(first.model.dspark_layers_to_capture, [1, 3])
        self.assertEqual(last.model.dspark_layers_to_capture, [7])
        self.assertFalse(first.capture_aux_hidden_states)
        self.assertTrue(last.capture_aux_hidden_states)
        self.assertEqual(capture.proxy_width(first), 0)
        self.assertEqual(capture.proxy_width(last), 2 * HIDDEN)

    def test_stage_with_nothing_to_carry(self):
        stage = divide(make_stage(0, 4, False), [5, 6])
        self.assertIsNone(stage.model.dspark_layers_to_capture)

    def test_stage_that_only_passes_states_on(self):
        stage = divide(make_stage(4, 6, False), [1, 7], pp_size=3)
        self.assertEqual(stage.model.dspark_layers_to_capture, [])

    def test_one_stage_keeps_sglangs_setter(self):
        stage = divide(make_stage(0, 8, True), [1, 3], pp_size=1)
        self.assertEqual(stage.model.dspark_layers_to_capture, [1, 3])
        self.assertTrue(stage.capture_aux_hidden_states)


def layer_output(layer_id):
    return torch.full((TOKENS, HIDDEN), float(layer_id))


def run_stage(stage, proxy):
    """One stage as the model runs it: packer, layers, exit or finalize."""
    inner = stage.model
    layers = inner.dspark_layers_to_capture
    packer = None if layers is None else AuxHiddenStatePacker(len(layers))
    packer = capture.start_packer(inner, packer, proxy)
    for layer_id in layers or ():
        packer.append(layer_output(layer_id))
    if stage.pp_group.is_last_rank:
        return packer.finalize()
    hidden = torch.zeros(TOKENS, 2, HIDDEN)
    if packer:
        return capture.stage_output(hidden, packer)
    return PPProxyTensors({"hidden_states": hidden.flatten(1)})


class TestPacker(CustomTestCase):
    def run_pipeline(self, bounds, layer_ids):
        proxy = None
        for start, end in zip(bounds, bounds[1:], strict=False):
            stage = make_stage(start, end, end == LAYERS)
            divide(stage, layer_ids, pp_size=len(bounds) - 1)
            proxy = run_stage(stage, proxy)
        return proxy

    def test_stages_equal_one(self):
        for layer_ids in ([0, 3, 7], [1, 2], [6, 7], [0]):
            expected = torch.cat([layer_output(i) for i in layer_ids], dim=-1)
            for bounds in ([0, 8], [0, 4, 8], [0, 2, 4, 8], [0, 1, 5, 8]):
                with self.subTest(layer_ids=layer_ids, bounds=bounds):
                    states = self.run_pipeline(bounds, layer_ids)
                    torch.testing.assert_close(states, expected)

    def test_dummy_run_keeps_the_width(self):
        """Its proxy has no states; a wrong count would end the engine's start."""
        stage = divide(make_stage(4, 8, True), [1, 3, 7])
        proxy = PPProxyTensors({"hidden_states": torch.zeros(TOKENS, 2 * HIDDEN)})
        states = run_stage(stage, proxy)
        self.assertEqual(tuple(states.shape), (TOKENS, 3 * HIDDEN))

    def test_model_calls_it(self):
        """The forward needs CUDA, so its calls are pinned by their place."""
        source = inspect.getsource(DeepseekV4Model._forward_impl)
        packer = source.index("AuxHiddenStatePacker(len(")
        start = source.index("start_packer(\n", packer)
        captured = source.index("dspark_aux_hidden_states.slot(", start)
        leave = source.index("if not self.pp_group.is_last_rank:", captured)
        export = source.index("return stage_output(", leave)
        self.assertLess(export, source.index("return PPProxyTensors(", leave))


if __name__ == "__main__":
    unittest.main()
