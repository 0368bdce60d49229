"""A pair behind a router that stays up: the CPU twin of the GPU recipe.

Life cycle: start prefill (with HiCache) and decode, then the router; print addresses;
wait until a signal or until one of them ends; stop all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dspark_pd.bed.bed import Bed, Engine, Router
from dspark_pd.bed.diagnosis import failure
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.models import MODELS, check_checkpoint, check_draft
from dspark_pd.bed.process import interrupt_on_signals
from dspark_pd.bed.specs import EngineSpec, Flag, RouterSpec

PAGE = 64
_CHUNK = 128

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
    for name in ("port", "prefill-port", "decode-port", "bootstrap-port"):
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
            env=DECODE_LIMITS,
        ),
    ]


def _wait(servers: Sequence[Engine | Router]) -> None:
    while True:
        for server in servers:
            if not server.alive():
                raise failure(server, "ended")
        time.sleep(1)


def _serve(args: argparse.Namespace) -> None:
    check_checkpoint(args.model, "--model")
    check_draft(args.draft, "--draft")
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
