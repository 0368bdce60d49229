"""A prefill engine loads the part of a draft that writes context KV, and no more.

Small drafts are put together from plain modules under SGLang's names and loaded by
SGLang's own methods: the real ones need a GPU (DeepSeek-V4) or a running engine.
"""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from sglang.srt.environ import envs
from sglang.srt.models import deepseek_v4_dspark
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.dspark import DSparkDraftModel
from sglang.srt.speculative.dspark_components import context_draft
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HIDDEN, STAGES = 8, 3


class Linear(nn.Linear):
    """Returns a pair, as SGLang's linear layers do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return super().forward(x), None


def modules(**children):
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def bare(kind, **attributes):
    """An instance of a draft class without its constructor."""
    draft = object.__new__(kind)
    nn.Module.__init__(draft)
    for name, value in attributes.items():
        setattr(draft, name, value)
    return draft


def deepseek_v4_draft():
    stages = []
    for index in range(STAGES):
        attention = modules(
            wq_a=Linear(HIDDEN, 4),
            wq_b=Linear(4, HIDDEN),
            wkv=Linear(HIDDEN, 6),
            kv_norm=nn.RMSNorm(6),
            wo_b=Linear(HIDDEN, HIDDEN),
            attn=nn.Module(),
        )
        attention.layer_id, attention.eps, attention.freqs_cis = index, 1e-6, None
        mlp = modules(gate=Linear(HIDDEN, 4), shared_experts=Linear(HIDDEN, 64))
        stage = modules(
            self_attn=attention, mlp=mlp, input_layernorm=nn.RMSNorm(HIDDEN)
        )
        stage.refresh_mhc_norm_weight_cache = lambda: None
        stages.append(stage)
    stages[0].main_proj = Linear(STAGES * HIDDEN, HIDDEN)
    stages[0].main_norm = nn.RMSNorm(HIDDEN)
    return bare(
        DeepseekV4ForCausalLMDSpark,
        stages=nn.ModuleList(stages),
        markov_head=modules(markov_w1=nn.Embedding(4, 2)),
        confidence_head=None,
        num_fused_shared_experts=0,
        config=SimpleNamespace(n_routed_experts=0),
    )


def dense_draft():
    layers = [
        modules(
            self_attn=modules(
                qkv_proj=Linear(HIDDEN, 12),
                o_proj=Linear(HIDDEN, HIDDEN),
                k_norm=nn.RMSNorm(4),
            ),
            mlp=modules(down_proj=Linear(32, HIDDEN)),
        )
        for _ in range(2)
    ]
    return bare(
        DSparkDraftModel,
        layers=nn.ModuleList(layers),
        fc=nn.Linear(HIDDEN, HIDDEN, bias=False),
        markov_head=modules(markov_w1=nn.Embedding(4, 2)),
        confidence_head=None,
        is_nemotron_35_draft=False,
        projector_type="dspark",
    )


def checkpoint(draft, rename=lambda name: name):
    generator = torch.Generator().manual_seed(1)
    return {
        rename(name): torch.randn(parameter.shape, generator=generator)
        for name, parameter in draft.named_parameters()
    }


def to_checkpoint_name(name):
    """A DeepSeek-V4 parameter as its checkpoints name it."""
    if name.startswith("markov_head."):
        return f"mtp.0.{name.replace('markov_w1', 'embed')}"
    name = name.replace("stages.", "mtp.", 1).replace("self_attn.", "attn.")
    name = name.replace("mlp.", "ffn.").replace("input_layernorm.", "attn_norm.")
    return name


class ContextDraftCase(CustomTestCase):
    def setUp(self):
        self.disagg = SimpleNamespace(
            disaggregation_mode="prefill", enable_pd_role_switch=False
        )
        self.enterContext(
            mock.patch.object(context_draft, "get_disagg", lambda: self.disagg)
        )

    def as_decode(self):
        self.disagg.disaggregation_mode = "decode"

    def filled(self, draft, weights):
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.zero_()
        draft.load_weights(iter(weights.items()))
        return {name for name, p in draft.named_parameters() if bool(p.detach().any())}


class TestDense(ContextDraftCase):
    def test_only_what_writes_kv_is_loaded(self):
        weights = checkpoint(dense_draft())
        loaded = self.filled(dense_draft(), weights)
        kept = {
            name for name in weights if ".mlp." not in name and ".o_proj." not in name
        }
        self.assertEqual(loaded, kept)
        self.as_decode()
        self.assertEqual(self.filled(dense_draft(), weights), set(weights))

    def test_idle_weights_are_not_handed_to_the_loader(self):
        """A tensor of a memory-mapped file is read when somebody looks into it."""
        weights = checkpoint(dense_draft())
        taken = {
            n for n, _ in context_draft.context_weights(dense_draft(), weights.items())
        }
        self.assertEqual(
            {n for n in weights if ".mlp." in n or ".o_proj." in n},
            set(weights) - taken,
        )

    def test_the_whole_draft_on_request(self):
        weights = checkpoint(dense_draft())
        with envs.SGLANG_DSPARK_PD_CONTEXT_ONLY_DRAFT.override(False):
            self.assertEqual(self.filled(dense_draft(), weights), set(weights))

    def test_an_engine_that_may_become_a_decode_keeps_all(self):
        self.disagg.enable_pd_role_switch = True
        weights = checkpoint(dense_draft())
        self.assertEqual(self.filled(dense_draft(), weights), set(weights))

    def test_weights_can_be_loaded_again(self):
        draft, weights = dense_draft(), checkpoint(dense_draft())
        self.assertEqual(self.filled(draft, weights), self.filled(draft, weights))


class TestDeepSeekV4(ContextDraftCase):
    def setUp(self):
        super().setUp()
        for name, value in (
            ("_dequant_fp8_wo_a_streaming", lambda weights: weights),
            ("_dspark_stage_config", lambda config: config),
            ("is_unified_kv_triton", lambda: False),
            ("_is_npu", False),
        ):
            self.enterContext(mock.patch.object(deepseek_v4_dspark, name, value))

    def written(self, draft, weights):
        """K and V rows of every stage that a prefill's injection stores."""
        draft.load_weights(iter(weights.items()))
        rows = {}
        pool = SimpleNamespace(
            uniform_fp8=False,
            set_swa_key_buffer_radix_fused_norm_rope=lambda layer_id, **kw: rows.update(
                {layer_id: (kw["kv"], kw["kv_weight"])}
            ),
        )
        with torch.no_grad():
            draft.write_target_hidden_kv(
                main_hidden=torch.arange(2.0 * STAGES * HIDDEN).view(2, -1),
                swa_loc=torch.arange(2),
                positions=torch.arange(2),
                pool=pool,
            )
        return rows

    def test_the_part_that_is_loaded_writes_the_same_kv(self):
        weights = checkpoint(deepseek_v4_draft(), to_checkpoint_name)
        part = deepseek_v4_draft()
        mine = self.written(part, weights)
        self.as_decode()
        whole = deepseek_v4_draft()
        theirs = self.written(whole, weights)
        self.assertEqual(len(mine), STAGES)
        for stage, (kv, norm) in mine.items():
            self.assertTrue(torch.equal(kv, theirs[stage][0]) and bool(kv.any()))
            self.assertTrue(torch.equal(norm, theirs[stage][1]))
        left = {name for name, _ in part.named_parameters()}
        gone = {name for name, _ in whole.named_parameters()} - left
        for stage in range(STAGES):
            self.assertIn(f"stages.{stage}.self_attn.wkv.weight", left)
            self.assertIn(f"stages.{stage}.mlp.shared_experts.weight", gone)
            self.assertIn(f"stages.{stage}.self_attn.wo_b.weight", gone)
        self.assertIsNotNone(part.stages[0].self_attn.attn)


if __name__ == "__main__":
    unittest.main()
