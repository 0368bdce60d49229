"""Targets, drafts and server arguments for the tests of the tail handoff."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import torch

from sglang.srt.speculative.dspark_components import dspark_handoff as handoff
from sglang.srt.speculative.dspark_components.handoff_refusals import VARIABLES
from sglang.test.test_utils import CustomTestCase


class HfConfig(SimpleNamespace):
    def get_text_config(self):
        return self

    def to_dict(self):
        return vars(self)


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
            "model_path": "target",
            "revision": None,
            "json_model_override_args": "{}",
            "trust_remote_code": False,
            "pp_size": 1,
            **more,
        }
    )


DECODE = {
    "disaggregation_mode": "decode",
    "speculative_algorithm": "DSPARK",
    "speculative_draft_model_path": "draft",
}


class HandoffCase(CustomTestCase):
    """No variable of the handoff is set, and no handoff outlives a test."""

    def setUp(self):
        kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        patch = mock.patch.dict(os.environ, kept, clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(handoff.deactivate)
        handoff.deactivate()

    @contextlib.contextmanager
    def drafts(self, config):
        """Let ``config`` be what every draft path leads to."""
        load = "sglang.srt.utils.hf_transformers_utils.get_config"
        with mock.patch(load, lambda path, **_: config):
            yield

    def refuse(self, pattern):
        return self.assertRaisesRegex(handoff.HandoffConfigError, pattern)
