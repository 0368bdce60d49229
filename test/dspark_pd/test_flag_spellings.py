"""Every spelling of a flag means to the doctor what SGLang makes of it.

Runs on the SGLang that can be imported; ``scripts/contract_tests.py`` runs it on the
others. SGLang's own parser and handlers resolve the flags, and its own function says
which widths a started engine has.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.version import Version

from dspark_pd.doctor import arguments
from dspark_pd.doctor.tables import load

pytest.importorskip("sglang.srt.server_args")

TARGET = Path(__file__).resolve().parents[1] / "assets" / "tiny-target"
MODEL = ["--model-path", str(TARGET), "--device", "cpu"]
SPELLINGS = (
    "--tp 8 --dp 8 --enable-dp-attention",
    "--tensor-parallel 8 --data-parallel-size 4 --enable-dp-attention",
    "--tp 8 --dp 2 --enable-dp-attention --attn-cp-size 2",
    "--dp 2",
    "--tp 8 --attn-cp-size 2",
    "--tp-size 8 --attention-context-parallel-size 4",
    "--tp 8 --ep 4",
    "--tp 8 --dp 8 --enable-dp-attention --expert-parallel-size 8",
    "--tp 2 --pp-size 2",
    "--tensor-parallel-size 2 --pipeline-parallel-size 4",
)
SINCE_0_5_22 = (
    "--tp 8 --attn-dp-size 8",
    "--tp 8 --attn-dp-size 4 --enable-dp-attention",
    "--tp 8 --attention-data-parallel-size 2 --attn-cp-size 2",
)


def resolved(words: list[str]) -> Any:
    """Return the server arguments as SGLang's handlers leave them."""
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args([*MODEL, *words])
    with mock.patch.dict(os.environ):
        # Before 0.5.20 construction resolves.
        getattr(args, "resolve_once", lambda: None)()
    with contextlib.suppress(ImportError):
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(args)
    return args


def widths(args: Any) -> dict[str, int]:
    """Return what the parallel state of a started engine has."""
    try:
        from sglang.srt.runtime_context import parallel_widths_of

        tp = parallel_widths_of(args)["attn_tp_size"]
    except ImportError:
        from sglang.srt.layers.dp_attention import compute_dp_attention_world_info

        names = inspect.signature(compute_dp_attention_world_info).parameters
        given = {name: getattr(args, name, 0) for name in names}
        _, tp, *_ = compute_dp_attention_world_info(**given)
    return {"tp": tp, "pp": args.pp_size, "cp": args.attn_cp_size}


def without_dcp(sizes: dict[str, int]) -> dict[str, int]:
    """No CPU has decode context parallelism: SGLang refuses it for other devices."""
    assert sizes.pop("dcp") == 1
    return sizes


def release() -> Version:
    return Version(importlib.metadata.version("sglang"))


@pytest.mark.parametrize("line", [*SPELLINGS, *SINCE_0_5_22])
def test_sizes_are_those_of_the_started_engine(line: str) -> None:
    words = line.split()
    if line in SINCE_0_5_22 and release() < Version("0.5.22"):
        with pytest.raises(SystemExit):
            resolved(words)
        return
    sizes = load("description").parallel_sizes
    args = resolved(words)
    engine = widths(args)
    names = ("tp_size", "pp_size", "dp_size", "attn_cp_size", "attn_dp_size")
    shown = {name: getattr(args, name, None) for name in names}
    shown["enable_dp_attention"] = args.enable_dp_attention
    assert without_dcp(sizes(shown)) == engine, "as /server_info shows them"
    given, unknown = arguments.parse(words, Path())
    assert without_dcp(sizes(given)) == engine, "as they are typed"
    # Expert parallelism divides no KV: the doctor does not read it.
    assert set(unknown) <= {"--ep", "--expert-parallel-size"}


@pytest.mark.parametrize("flag", ["--speculative-algo", "--speculative-algorithm"])
@pytest.mark.parametrize("name", ["dspark", "DSpark", "DSPARK"])
def test_the_algorithm_is_the_same_in_any_case(flag: str, name: str) -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args([*MODEL, flag, name]).speculative_algorithm
    assert SpeculativeAlgorithm.from_string(read).is_dspark()
    given, _ = arguments.parse([flag, name], Path())
    described = load("description").describe(given, role="prefill")
    assert (described["algorithm"], described["mode"]) == ("DSPARK", "native")
