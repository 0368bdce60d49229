"""What happens in an engine's first process before it starts the others."""

from __future__ import annotations

from typing import Any

from sglang_cpu_reference import cores, forking


def before_processes_start(result: object, server_args: Any, *args: object) -> None:
    """Hook after ``_set_envs_and_config``, where SGLang chooses ``spawn``."""
    del result, args
    forking.start_by_fork()
    if server_args.tp_size * server_args.pp_size > 1:
        cores.share_one_core()
