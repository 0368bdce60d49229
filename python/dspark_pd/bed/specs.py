"""What to start, as data: engines and routers, and the command lines they become."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dspark_pd.bed.ports import LOOPBACK, Endpoint
from dspark_pd.bed.verbs_library import library_folders

Backend = Literal["nixl", "mooncake"]
Role = Literal["unified", "prefill", "decode"]
Device = Literal["cpu", "cuda"]
Flag = str | int | float | bool | None | Sequence[str]

# The tiny models need a few hundred tokens at a time. A small pool keeps memory low,
# and a pool sized by "free memory" would differ from machine to machine.
_POOL_TOKENS = 16_384
_MAX_RUNNING_REQUESTS = 16
# Ports that an engine with attention DP takes, counted from its own.
_ATTENTION_DP_PORTS = range(233, 240)
# On a GPU: engines share it, and heads of 32 are too small for some backends.
_CUDA_FLAGS: Mapping[str, str | float] = {
    "dtype": "bfloat16",
    "mem-fraction-static": 0.2,
    "attention-backend": "triton",
}


@dataclass(frozen=True)
class EngineSpec:
    """One engine. `draft` names a DSPARK draft checkpoint; None means no speculation.

    `args` are flags of `sglang.launch_server` without the dashes and win over the
    defaults; None or False removes a default, True is a bare flag. `env` wins too.
    `attention_dp` divides `tp`: attention is computed by that many groups, each with its
    own requests.
    `port` and `bootstrap_port` are chosen when they are None.
    """

    name: str
    role: Role
    model: Path
    draft: Path | None = None
    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    overlap: bool = True
    page_size: int | None = None
    chunked_prefill: int | None = None
    port: int | None = None
    bootstrap_port: int | None = None
    device: Device = "cpu"
    transfer_backend: Backend = "nixl"
    args: Mapping[str, Flag] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Python processes it becomes: front end, detokenizer, one per rank."""
        return 2 + self.tp * self.pp + (self.attention_dp > 1)

    @property
    def port_offsets(self) -> Sequence[int]:
        """Ports that it takes without being told, counted from its own."""
        return _ATTENTION_DP_PORTS if self.attention_dp > 1 else ()

    def flags(self, port: int, bootstrap_port: int | None) -> dict[str, Flag]:
        """Flags by name, defaults first, `args` last."""
        flags: dict[str, Flag] = {
            "model-path": str(self.model),
            "host": LOOPBACK,
            "port": port,
            "dtype": "float32",
            "tp-size": self.tp,
            "pp-size": self.pp,
            "max-total-tokens": _POOL_TOKENS,
            "max-running-requests": _MAX_RUNNING_REQUESTS,
            "random-seed": 1,
            "disable-overlap-schedule": not self.overlap,
            "page-size": self.page_size,
            "chunked-prefill-size": self.chunked_prefill,
        }
        if self.attention_dp > 1:
            flags["attn-dp-size"] = self.attention_dp
            # DSPARK asks for it.
            flags["enable-dp-lm-head"] = True
        if self.device == "cuda":
            flags |= _CUDA_FLAGS
        if self.draft is not None:
            flags["speculative-algorithm"] = "DSPARK"
            flags["speculative-draft-model-path"] = str(self.draft)
        if self.role != "unified":
            flags["disaggregation-mode"] = self.role
            flags["disaggregation-transfer-backend"] = self.transfer_backend
        if self.role == "decode":
            # The default backup is a host pool, which wants 10 GiB free at start.
            flags["disaggregation-decode-retraction-backup"] = "cpu_tensor"
        if self.role == "prefill":
            flags["disaggregation-bootstrap-port"] = bootstrap_port
        return {**flags, **self.args}

    def command(self, port: int, bootstrap_port: int | None) -> list[str]:
        """Program and arguments."""
        flags = self.flags(port, bootstrap_port)
        return [interpreter(), "-m", "sglang.launch_server", *to_argv(flags)]

    def environment(self, stats_dir: Path) -> dict[str, str]:
        """Environment of the engine; `stats_dir` is where byte counters go.

        The CPU platform writes them; on a GPU there are none.
        """
        if self.device == "cuda":
            environ = base_environment()
            del environ["SGLANG_PLATFORM"]
            return {**environ, **self.env}
        return {
            **base_environment(),
            "SGLANG_CPU_REFERENCE_STATS_DIR": str(stats_dir),
            **self.env,
        }


@dataclass(frozen=True)
class RouterSpec:
    """One router over started engines, which it is told by their addresses."""

    name: str
    prefills: Sequence[Endpoint] = ()
    decodes: Sequence[Endpoint] = ()
    port: int | None = None
    args: Mapping[str, Flag] = field(default_factory=dict)

    def command(self, port: int, metrics_port: int) -> list[str]:
        """Program and arguments, as in the recipe's `router.sh`, which says why."""
        argv = [interpreter(), "-m", "sglang_router.launch_router"]
        argv.append("--pd-disaggregation")
        for prefill in self.prefills:
            argv += ["--prefill", prefill.url, str(prefill.bootstrap_port)]
        for decode in self.decodes:
            argv += ["--decode", decode.url]
        flags: dict[str, Flag] = {
            "host": LOOPBACK,
            "port": port,
            "prometheus-host": LOOPBACK,
            "prometheus-port": metrics_port,
            "policy": "round_robin",
            "health-check-interval-secs": 2,
            "health-success-threshold": 1,
            "disable-circuit-breaker": True,
        }
        return argv + to_argv({**flags, **self.args})


def interpreter() -> str:
    """Python that has SGLang: this one, unless `DSPARK_PD_PYTHON` names another."""
    return os.environ.get("DSPARK_PD_PYTHON") or sys.executable


def to_argv(flags: Mapping[str, Flag]) -> list[str]:
    """Flags in command-line form; None and False are left out."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            argv += [str(item) for item in value]
        else:
            argv.append(str(value))
    return argv


def base_environment() -> dict[str, str]:
    """The caller's environment, made local, offline and single-threaded.

    Settings of the patch set that a user may have exported are dropped: an engine of
    the bed gets those from its own specification only. So is the name of the test that
    runs: libraries look for it while they are imported.
    """
    dropped = ("SGLANG_DSPARK_PD_", "PYTEST_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    env.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
        SGLANG_PLATFORM="cpu_reference",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        SGLANG_HOST_IP=LOOPBACK,
        HOST_IP=LOOPBACK,
        NO_PROXY=LOOPBACK,
        no_proxy=LOOPBACK,
        # Longer than the router keeps an idle connection. An engine that closes first,
        # by default after 5 s, loses a request that crosses its goodbye.
        SGLANG_TIMEOUT_KEEP_ALIVE="60",
    )
    if folders := library_folders(interpreter()):
        known = env.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = os.pathsep.join(
            [*folders, *([known] if known else [])]
        )
    return env
