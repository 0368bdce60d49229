"""A pair behind a router that stays up: the CPU twin of the GPU recipe.

Life cycle: start prefill (with HiCache) and decode, then the router; print addresses;
wait until a signal or until one of them ends; stop all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_pd.bed.bed import Bed, Engine, Router
from dspark_pd.bed.checks import check_backend
from dspark_pd.bed.diagnosis import failure
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.models import MODELS, check_checkpoint, check_draft
from dspark_pd.bed.ports import claim_port
from dspark_pd.bed.process import interrupt_on_signals
from dspark_pd.bed.report import TITLES
from dspark_pd.bed.specs import EngineSpec, Flag, RouterSpec

PAGE = 64
_CHUNK = 128
_PORTS = ("port", "prefill-port", "decode-port", "bootstrap-port")

#: HiCache as the GPU recipe has it: every tier, written through, read when complete.
HICACHE: dict[str, Flag] = {
    "enable-hierarchical-cache": True,
    "hicache-ratio": 2,
    "hicache-size": 0,
    "hicache-mem-layout": "page_first_direct",
    "hicache-io-backend": "direct",
    "hicache-write-policy": "write_through",
    "hicache-storage-backend": "file",
    "hicache-storage-prefetch-policy": "wait_complete",
}
STORAGE_DIR_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"

#: Time limits of each role in seconds, as the GPU recipe has them and says why.
PREFILL_LIMITS = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30"}
DECODE_LIMITS = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "120",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODELS.target)
    parser.add_argument("--draft", type=Path, default=MODELS.draft_full)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--transfer-backend",
        choices=tuple(TITLES),
        default="nixl",
        help="what moves KV between the engines (default: nixl)",
    )
    for name in _PORTS:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--hicache-dir", type=Path, help="default: in the log folder")
    return parser.parse_args(argv)


def _specs(args: argparse.Namespace, storage: Path) -> list[EngineSpec]:
    model, draft = args.model.resolve(), args.draft.resolve()
    return [
        EngineSpec(
            "prefill",
            "prefill",
            model,
            draft,
            tp=args.tp,
            page_size=PAGE,
            chunked_prefill=_CHUNK,
            port=args.prefill_port,
            bootstrap_port=args.bootstrap_port,
            transfer_backend=args.transfer_backend,
            args=HICACHE,
            env={STORAGE_DIR_ENV: str(storage), **PREFILL_LIMITS},
        ),
        EngineSpec(
            "decode",
            "decode",
            model,
            draft,
            tp=args.tp,
            page_size=PAGE,
            port=args.decode_port,
            transfer_backend=args.transfer_backend,
            env=DECODE_LIMITS,
        ),
    ]


def _wait(servers: Sequence[Engine | Router]) -> None:
    while True:
        for server in servers:
            if not server.alive():
                raise failure(server, "ended")
        time.sleep(1)


def _check(args: argparse.Namespace) -> None:
    """BedError for what no engine can start with; ports are claimed, a folder is made."""
    _check_tp(args.tp, check_checkpoint(args.model, "--model"))
    check_draft(args.draft, "--draft")
    check_backend(args.transfer_backend)
    claimed: dict[int, str] = {}
    for name in _PORTS:
        port = getattr(args, name.replace("-", "_"))
        if port is None:
            continue
        owner = f"--{name} ({name.replace('-', '_').upper()})"
        if port in claimed:
            raise BedError(
                f"{owner}: port {port} is given twice",
                expected="a port for each server",
                found=f"{claimed[port]} is {port} too",
                next_step="pass another port",
                usage=True,
            )
        claimed[claim_port(port, owner)] = owner
    if args.hicache_dir:
        _make_folder(args.hicache_dir)


def _check_tp(tp: int, config: dict[str, Any]) -> None:
    heads = [config.get(f"num_{kind}_heads") for kind in ("attention", "key_value")]
    attention, kv = [n if isinstance(n, int) and n > 0 else None for n in heads]
    fits = tp > 0 and not (attention or tp) % tp
    if fits and kv:
        # More ranks than KV heads: each head is on several ranks.
        fits = not (kv % tp if kv >= tp else tp % kv)
    if not fits:
        raise BedError(
            f"--tp (TP) {tp} does not fit the model",
            expected="1 or more ranks, among which its heads can be shared out evenly",
            found=f"{attention} attention heads and {kv} KV heads",
            next_step="pass 1, or 2, which also fits the model of this repository",
            usage=True,
        )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise BedError(
            f"--hicache-dir (HICACHE_DIR) {path} takes no files",
            expected="a folder that this user can write to, or a name for a new one",
            found=str(error),
            next_step="name another folder, or leave it out",
            usage=True,
        ) from error


def _serve(args: argparse.Namespace) -> None:
    _check(args)
    with Bed("twin", keep_logs=True) as bed:
        storage = (args.hicache_dir or bed.folder / "hicache").resolve()
        storage.mkdir(parents=True, exist_ok=True)
        prefill, decode = bed.start(_specs(args, storage))
        router = bed.start_router(
            RouterSpec("router", [prefill.endpoint], [decode.endpoint], port=args.port)
        )
        print(f"router  {router.url}   prefill {prefill.url}   decode {decode.url}")
        print(f"KV files in {storage}; Ctrl-C stops everything", flush=True)
        _wait([prefill, decode, router])


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m dspark_pd.bed.serve`."""
    args = _arguments(argv)
    interrupt_on_signals()
    try:
        _serve(args)
    except BedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2 if error.usage else 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
