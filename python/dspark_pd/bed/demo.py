"""Real engines on this machine, side by side: unified serving and prefill/decode.

Life cycle: check what can be checked in a second; then wave by wave start engines,
put a router before each pair, send the same prompts, stop the engines; then compare,
print, and leave with 0 when every claim held, 1 when one did not, 2 when what was
asked cannot be done on this machine, 6 when the report cannot be written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dspark_pd.bed import checks, modes
from dspark_pd.bed.bed import Bed, Engine
from dspark_pd.bed.client import Client
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.models import MODELS, check_checkpoint, check_draft
from dspark_pd.bed.ports import claim_port
from dspark_pd.bed.process import interrupt_on_signals
from dspark_pd.bed.prompts import Prompt, make_prompts
from dspark_pd.bed.report import TITLES, Report, Run, write_report
from dspark_pd.bed.specs import RouterSpec
from dspark_pd.messages.exit_codes import FILE_SYSTEM
from dspark_pd.messages.output import Parser, a_new_file, a_path, write

EXIT_OK, EXIT_DIFFERS, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPTED = 130
_REQUESTS = 8
_SEED = 7
_PARALLEL = 4
# A draft that sees 31 tokens can only copy a key whose whole period fits in them.
_SLIDING_KEYS = (10, 23)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `dspark-pd demo`."""
    names = ", ".join(mode.key for wave in modes.WAVES for mode in wave.modes)
    parser.add_argument(
        "--json", metavar="FILE", type=a_new_file, help="write the report"
    )
    parser.add_argument("--modes", metavar="A,B", help=f"only these of: {names}")
    text = f"requests that each mode gets (default: {_REQUESTS})"
    parser.add_argument(
        "--requests", metavar="N", type=_count, default=_REQUESTS, help=text
    )
    _add_models(parser)
    text = "cuda: one GPU, with the SGLang of this environment (never run by us)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "what moves KV between the engines of a pair (default: nixl)"
    parser.add_argument(
        "--transfer-backend", choices=tuple(TITLES), default="nixl", help=text
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=int,
        help="port of a router, N + 1 for the next pair (default: free ones)",
    )
    text = "folder for the engines' logs (default: a new one)"
    parser.add_argument("--log-dir", metavar="DIR", type=_path, help=text)
    parser.add_argument(
        "--keep-logs", action="store_true", help="also when everything went well"
    )


def _path(text: str) -> Path:
    return Path(a_path(text))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text!r}")
    return int(text)


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = (
        ("--model", MODELS.target, "target model"),
        ("--draft", MODELS.draft_full, "DSpark draft with full attention"),
        ("--sliding-draft", MODELS.draft_swa, "draft with sliding windows, for a tail"),
    )
    for flag, path, what in models:
        text = f"{what} (default: the tiny one of the repository)"
        parser.add_argument(flag, metavar="DIR", type=_path, default=path, help=text)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code and prints everything a user needs."""
    interrupt_on_signals()
    try:
        report = _run(args)
    except BedError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return EXIT_USAGE if error.usage else EXIT_DIFFERS
    except KeyboardInterrupt:
        print("\ndemo: interrupted; everything it started is stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    code = _conclude(report)
    return _written(args.json, report, code) if args.json else code


def _written(path: Path, report: Report, code: int) -> int:
    """Write the report; `code`, or another when that fails: the table is printed by then."""
    try:
        write_report(path, report.as_json())
    except BedError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return FILE_SYSTEM
    return code


def _run(args: argparse.Namespace) -> Report:
    began = time.monotonic()
    waves = modes.on_device(_chosen(args.modes), args.device)
    pair = modes.Pair(
        args.model.resolve(), args.draft.resolve(), args.sliding_draft.resolve()
    )
    check_checkpoint(pair.target, "--model")
    gamma = check_draft(pair.draft, "--draft")
    if any(mode.sliding for wave in waves for mode in wave.modes):
        waves = _resolve_tails(waves, pair.sliding_draft)
    if args.port is not None:
        claim_port(args.port, "--port")
    installed = checks.check_installed(args.device)
    checks.check_applied(args.device)
    checks.check_backend(args.transfer_backend)
    if args.device == "cuda":
        # What is forked has been imported for the CPU platform.
        os.environ["DSPARK_PD_ZYGOTE"] = "0"
    for wave in waves:
        checks.check_memory(modes.specs(wave, pair, args.device))
    prompts = {
        False: make_prompts(args.requests, seed=_SEED),
        True: make_prompts(args.requests, seed=_SEED, key_len=_SLIDING_KEYS),
    }
    with Bed("demo", folder=args.log_dir, say=_say, keep_logs=args.keep_logs) as bed:
        _say(f"SGLang {installed.sglang}, gamma {gamma}, logs in {bed.folder}")
        runs: list[Run] = []
        for wave in waves:
            runs += _run_wave(bed, wave, pair, prompts, args)
    _say(f"all engines stopped after {time.monotonic() - began:.0f} s")
    return Report(
        installed.sglang, gamma, tuple(runs), args.device, args.transfer_backend
    )


def _resolve_tails(waves: list[modes.Wave], draft: Path) -> list[modes.Wave]:
    """Name the length that a tail of -1 stands for, as the engines resolve it."""
    check_draft(draft, "--sliding-draft")
    window = check_checkpoint(draft, "--sliding-draft").get("sliding_window")
    if not isinstance(window, int):
        raise BedError(
            f"--sliding-draft {draft} has no sliding window",
            expected="a draft whose layers are all sliding_attention",
            found="config.json gives no sliding_window",
            next_step="leave the option out for the shipped draft",
            usage=True,
        )
    resolved = {
        mode.key: replace(mode, tail_tokens=window - 1)
        for wave in waves
        for mode in wave.modes
        if mode.tail_tokens == -1
    }
    return [
        replace(wave, modes=tuple(resolved.get(m.key, m) for m in wave.modes))
        for wave in waves
    ]


def _chosen(text: str | None) -> list[modes.Wave]:
    try:
        return modes.choose(text.split(",") if text else None)
    except KeyError as error:
        known = ", ".join(mode.key for wave in modes.WAVES for mode in wave.modes)
        raise BedError(
            f"--modes: no mode {error.args[0]!r}",
            expected=f"names out of: {known}",
            found=str(text),
            next_step="correct the name",
            usage=True,
        ) from None


def _run_wave(
    bed: Bed,
    wave: modes.Wave,
    pair: modes.Pair,
    prompts: Mapping[bool, Sequence[Prompt]],
    args: argparse.Namespace,
) -> list[Run]:
    _say(f"starting {', '.join(wave.engines)}")
    engines = dict(
        zip(
            wave.engines,
            bed.start(modes.specs(wave, pair, args.device, args.transfer_backend)),
            strict=True,
        )
    )
    pairs = [mode for mode in wave.modes if len(mode.engines) > 1]
    routers = bed.start_routers(
        [
            RouterSpec(
                f"router-{mode.key}",
                [engines[mode.engines[0]].endpoint],
                [engines[mode.engines[1]].endpoint],
                port=None if args.port is None else args.port + i,
            )
            for i, mode in enumerate(pairs)
        ]
    )
    clients = {
        mode.key: Client.unified(engines[mode.engines[0]])
        for mode in wave.modes
        if mode not in pairs
    }
    for mode, router in zip(pairs, routers, strict=True):
        clients[mode.key] = Client.router(router)
    runs = [
        _run_mode(
            mode, clients[mode.key], engines[mode.engines[0]], prompts[mode.sliding]
        )
        for mode in wave.modes
    ]
    bed.assert_healthy()
    bed.stop()
    return runs


def _run_mode(
    mode: modes.Mode, client: Client, source: Engine, prompts: Sequence[Prompt]
) -> Run:
    """`source` is the engine that posts transfers: prefill, in a pair."""
    before = source.bytes_posted()
    began = time.monotonic()
    replies = client.generate(
        [prompt.ids for prompt in prompts],
        [prompt.max_new_tokens for prompt in prompts],
        parallel=_PARALLEL,
        stream=True,
    )
    seconds = time.monotonic() - began
    _say(f"{mode.key}: {len(replies)} requests in {seconds:.1f} s")
    return Run(mode, tuple(replies), source.bytes_posted() - before, seconds)


def _conclude(report: Report) -> int:
    claims = report.claims()
    lines = [
        f"\n{report.table()}\n",
        "verify steps = passes of the target over drafted tokens; accept length = tokens"
        f" per pass\n(1 = no drafted token accepted, {report.gamma + 1} = all accepted)."
        " Output is the same even if the draft has no context:\nonly the accept length"
        " shows whether its context arrived.\n",
    ]
    if steps := report.step_table():
        lines.append(f"{steps}\n")
    lines += (f"  {'ok  ' if claim.holds else 'FAIL'} {claim.text}" for claim in claims)
    write("\n".join(lines) + "\n")
    return EXIT_OK if all(claim.holds for claim in claims) else EXIT_DIFFERS


def _say(text: str) -> None:
    print(f"[demo] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m dspark_pd.bed.demo`."""
    description = (__doc__ or "").partition("\n")[0]
    parser = Parser(prog="dspark-pd demo", description=description)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
