"""The doctor and a pipelined prefill with a draft: where to cut, and what is refused."""

from __future__ import annotations

import pytest

from doctor_bench import DRAFT, QWEN, Bench, command, dspark

pytestmark = pytest.mark.unit

KV = {"num_key_value_heads": 8, "head_dim": 128}
TARGET = {**QWEN, **KV, "num_hidden_layers": 36}
FIVE = {**DRAFT, **KV, "num_hidden_layers": 5}


def findings(bench: Bench, flags: str, env: str = "", **configs: dict) -> dict:
    model = bench.model("target", configs.get("target", TARGET))
    draft = dspark(bench, configs.get("draft", FIVE))
    found = bench.findings(
        command(model, "prefill", f"{draft} {flags}", env=env),
        command(model, "decode", draft),
    )
    return {finding.code: finding for finding in found}


@pytest.mark.parametrize(
    ("stages", "draft", "cut"),
    [
        (2, FIVE, "21,15"),
        (3, FIVE, "14,14,8"),
        (4, FIVE, "11,10,10,5"),
        # One KV head instead of eight: less than a layer of the target.
        (2, {**FIVE, "num_key_value_heads": 1}, "19,17"),
    ],
)
def test_a_cut_that_spreads_target_and_draft(bench, stages, draft, cut):
    found = findings(bench, f"--pp-size {stages}", draft=draft)
    assert f"SGLANG_PP_LAYER_PARTITION={cut} " in found["DOC-STAGES"].fix
    assert f"{stages} stages" in found["DOC-STAGES"].message


@pytest.mark.parametrize(
    ("flags", "env", "target"),
    [
        ("", "", TARGET),
        ("--pp-size 2", "SGLANG_PP_LAYER_PARTITION=20,16", TARGET),
        ("--pp-size 2", "", {**TARGET, "kv_lora_rank": 512}),
    ],
)
def test_nothing_to_say_about_the_cut(bench, flags, env, target):
    assert "DOC-STAGES" not in findings(bench, flags, env, target=target)


def test_a_cut_that_is_none_is_refused(bench):
    found = findings(bench, "--pp-size 2", "SGLANG_PP_LAYER_PARTITION=20,15")
    assert "names 35 layers and the target has 36" in found["DOC-PP-PARTITION"].message


def test_layers_that_must_cross_stages_of_another_target(bench):
    other = {**TARGET, "architectures": ["OtherForCausalLM"]}
    found = findings(bench, "--pp-size 2", target=other)["DOC-TAIL-STAGES"]
    assert "the last stage starts with layer 18" in found.message
    late = {**FIVE, "target_layer_ids": [20, 30]}
    for key in ("dflash_config", "dspark_config"):
        late.pop(key, None)
    assert "DOC-TAIL-STAGES" not in findings(
        bench, "--pp-size 2", target=other, draft=late
    )
