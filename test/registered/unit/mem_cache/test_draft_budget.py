"""The draft's KV is charged to the pipeline stage that allocates it.

A Qwen3-8B class target (36 layers, 8 KV heads of 128, bfloat16) with a draft of 5
layers, on two stages: bytes per token that each stage's budget counts.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers.cp import utils as cp_utils
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

LAYER_BYTES = 2 * 8 * 128 * 2
TARGET_LAYERS, DRAFT_LAYERS = 36, 5


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of one rank of a stage, and a draft whose bytes are known."""
    settings = SimpleNamespace(
        attn_dcp_size=1,
        attn_tp_size=1,
        max_total_tokens=None,
        max_running_requests=None,
        enable_hisparse=False,
        enable_encoder_swa_bounded_replay=False,
        disaggregation_mode="prefill",
        disaggregation_decode_extra_slots=0,
        speculative_algorithm="DSPARK",
    )
    settings.features = settings.kernel = settings
    settings.dsv4_attn_backend = "trtllm"
    names = ["disagg", "exec", "memory", "parallel", "schedule", "spec"]
    replaced = {f"get_{name}": lambda: settings for name in names}
    replaced |= {
        "mambaish_config": lambda _: None,
        "compute_page_shard_scratch_bytes": lambda *_, **__: 0,
        "max_speculative_num_draft_tokens": lambda: 5,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(pool_configurator, name, value)
    for name in ("mambaish_config", "hybrid_gdn_config", "hybrid_kda_config"):
        monkeypatch.setattr(kv_cache_configurator, name, lambda _: None)
    monkeypatch.setattr(
        kv_cache_configurator,
        "resolve_dflash_draft_cell_size",
        lambda draft_num_layers, **_: draft_num_layers * LAYER_BYTES,
    )
    monkeypatch.setattr(
        cp_utils, "is_glm_dsa_cache_layer_split_enabled", lambda _: False
    )
    monkeypatch.setattr(KVCacheConfigurator, "_resolve_kv_shard", lambda _: None)
    monkeypatch.setattr(KVCacheConfigurator, "fused_entry_bytes", lambda *_: None)


def stage(start: int, end: int, size: int = 2) -> KVCacheConfigurator:
    """The configurator of one stage, resolved from its fields."""
    kvc = object.__new__(KVCacheConfigurator)
    hf_config = SimpleNamespace(architectures=["Qwen3ForCausalLM"])
    fields = dict(
        pp_size=size,
        pp_group=SimpleNamespace(is_last_rank=end == TARGET_LAYERS),
        model_config=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            get_num_kv_heads=lambda *_: 8,
            head_dim=128,
            v_head_dim=128,
            context_len=4096,
        ),
        server_args=SimpleNamespace(enable_hisparse=False),
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        spec_algorithm=SpeculativeAlgorithm.DSPARK,
        is_draft_worker=False,
        use_mla_backend=False,
        draft_parallel_layout=SimpleNamespace(attn_tp_size=1),
        layer_info=SimpleNamespace(
            start_layer=start,
            end_layer=end,
            num_effective_layers=end - start,
            is_hybrid_swa_mtp_draft=False,
        ),
        spec_aux_config=SpecAuxHiddenStateConfig(
            dflash_draft_num_layers=DRAFT_LAYERS,
            draft_kv_num_layers=DRAFT_LAYERS,
            draft_model_config=object(),
        ),
        dflash_draft_cell_size_per_token=None,
    )
    for name, value in fields.items():
        setattr(kvc, name, value)
    return kvc


def charged_layers(start: int, end: int, size: int = 2) -> float:
    """Layers that one stage's bytes per token pay for."""
    kvc = stage(start, end, size)
    kvc.__post_init__()
    return pool_configurator.DefaultPoolConfigurator(kvc)._cell_size / LAYER_BYTES


def test_only_the_last_stage_is_charged():
    assert charged_layers(0, 36, size=1) == 41
    assert [charged_layers(0, 18), charged_layers(18, 36)] == [18, 23]
    # The larger stage decides how many tokens fit: 21 layers against 23, where both
    # stages were charged for the draft 26 of them.
    assert [charged_layers(0, 21), charged_layers(21, 36)] == [21, 20]


def charged_by_deepseek_v4(
    start: int, end: int, monkeypatch: pytest.MonkeyPatch, size: int = 2
) -> float:
    """Bytes of a token, in those of the stage's target layers alone."""
    configurator = pool_configurator.DSV4PoolConfigurator
    for name in ("_get_bytes_per_swa_token", "_get_bytes_per_full_token"):
        monkeypatch.setattr(configurator, name, lambda self: 1.0)
    monkeypatch.setattr(configurator, "_resolve_swa_prefix_tails", lambda _: 0)
    monkeypatch.setattr(configurator, "_resolve_swa_cap_tokens", lambda _: None)
    monkeypatch.setattr(
        configurator, "_assert_ring_serves_draft_tokens", lambda *_: None
    )
    for name in ("get_swa_ring_size", "collect_sources_by_ratio"):
        monkeypatch.setattr(pool_configurator, name, lambda *_: {})
    for name in (
        "check_dsv4_unified_fp8_pd_supported",
        "_operator_swa_full_tokens_ratio",
        "get_dsv4_indexer_bytes_per_token",
        "uses_draft_swa_ring",
    ):
        monkeypatch.setattr(
            pool_configurator, name, lambda *_, **__: None, raising=False
        )
    kvc = stage(start, end, size)
    kvc.sliding_window_size, kvc.page_size, kvc.attn_dp_size = 128, 64, 1
    kvc.pp_group.rank_in_group = int(start > 0)
    model = kvc.model_config
    model.qk_nope_head_dim, model.qk_rope_head_dim, model.index_head_dim = 448, 64, 128
    model.compress_ratios, model.window_size = [0] * TARGET_LAYERS, 128
    model.hf_config.kv_source_layer_ids = None
    return configurator(kvc).bytes_per_full_token


def test_only_the_last_stage_of_deepseek_v4_is_charged(monkeypatch):
    charged = partial(charged_by_deepseek_v4, monkeypatch=monkeypatch)
    assert charged(0, 36, size=1) == 37 / 36
    assert [charged(0, 18), charged(18, 36)] == [1, 19 / 18]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
