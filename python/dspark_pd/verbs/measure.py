"""``measure``: accept length of a live deployment, by step, cache tier and prefill.

A client of HTTP alone: it streams requests and counts the tokens of each event, which is
one verify step. With a reference every figure is also a ratio. Exit 1 when an ``--assert``
does not hold or a request failed, 130 when it was interrupted; what is known is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dspark_pd.measure import web
from dspark_pd.measure.client import ENDPOINTS, Address, Client, Engines, Served, Where
from dspark_pd.measure.deployment import (
    Deployment,
    bootstrap_port,
    look,
    refuse_other_model,
)
from dspark_pd.measure.diagnosis import diagnose
from dspark_pd.measure.plot import draw
from dspark_pd.measure.prompts import DATASETS, Prompt, make_prompts, read_prompts
from dspark_pd.measure.report import (
    NAMES,
    Assertion,
    as_data,
    as_lines,
    asserted,
    failures,
)
from dspark_pd.measure.runner import Plan, Side
from dspark_pd.measure.runner import run as send
from dspark_pd.measure.statistics import Measured
from dspark_pd.messages import exit_codes
from dspark_pd.messages.errors import Problem, refuse
from dspark_pd.messages.output import a_new_file
from dspark_pd.messages.result import Result, count
from dspark_pd.verbs.servers import add_api_key, api_key, seconds

_LOOK_S = 10.0
_FIRST_TOKENS = 8
_MOST = 1_000_000
_EPILOG = f"""\
figures for --assert: {NAMES}
a figure that was not measured holds nothing

lines of --prompts: text, or JSON: a string, or an object with text, prompt, messages or
input_ids
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    text = "address of the router"
    parser.add_argument("--url", required=True, metavar="URL", type=_url, help=text)
    text = "one server with the same models: every figure becomes a ratio as well"
    parser.add_argument("--reference", metavar="URL", type=_url, help=text)
    parser.add_argument(
        "--endpoint",
        choices=tuple(ENDPOINTS),
        default="generate",
        help="(default: %(default)s)",
    )
    prompts = parser.add_mutually_exclusive_group()
    text = "prompts to send, one in a line"
    prompts.add_argument("--prompts", metavar="FILE", type=Path, help=text)
    text = "made prompts: a key that repeats itself, or random words (default: repeat)"
    prompts.add_argument("--dataset", choices=DATASETS, default="repeat", help=text)
    _add_counts(parser)
    text = "send each prompt to each prefill in turn, past the router, to its engines"
    parser.add_argument("--each-prefill", action="store_true", help=text)
    text = "exit 1 unless it holds, as in ratio>=0.98 (repeatable)"
    parser.add_argument(
        "--assert",
        dest="asserts",
        action="append",
        default=[],
        metavar="FIGURE>=N",
        type=_assertion,
        help=text,
    )
    text = "write the report as JSON"
    parser.add_argument("--save", metavar="FILE", type=a_new_file, help=text)
    text = "write accept length by step as SVG"
    parser.add_argument("--plot", metavar="FILE", type=a_new_file, help=text)
    text = "seconds to wait for the next event of a stream (default: 120)"
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="S", help=text
    )
    add_api_key(parser)


def _add_counts(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("requests", None, "prompts (default: 32, or all of the file)"),
        ("concurrency", 4, "requests at a time (default: %(default)s)"),
        (
            "repeat",
            1,
            "times each prompt is sent; later ones find it cached (default: 1)",
        ),
        ("new-tokens", 128, "tokens of each answer (default: %(default)s)"),
        (
            "prompt-length",
            1024,
            "most characters of a made prompt (default: %(default)s)",
        ),
    ):
        parser.add_argument(
            f"--{name}", metavar="N", type=_count, default=default, help=text
        )
    text = "of the made prompts (default: another one each time, so that no cache has them)"
    parser.add_argument("--seed", metavar="N", type=int, help=text)
    text = "of sampling (default: 0; texts are compared at 0 only)"
    parser.add_argument(
        "--temperature", metavar="T", type=_temperature, default=0.0, help=text
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"expected 1 to {_MOST}, found {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"expected 0 or more, found {text!r}")
    return found


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no http://host:port")
    return text.rstrip("/")


def _assertion(text: str) -> Assertion:
    try:
        return Assertion.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> Result:
    """Measure what is at ``options.url``; refuses with T108 and T109 what cannot be."""
    key = api_key(options)
    prompts = _prompts(options)
    pair = look(options.url, _LOOK_S, key, "--url")
    reference = None
    notes = _notes(options, pair)
    if options.reference:
        reference = look(options.reference, _LOOK_S, key, "--reference")
        notes += refuse_other_model(pair, reference)
    sides = [_side("--url", options, pair, _places(options, pair, key), key)]
    if reference:
        place = [(None, Address(reference.url, options.endpoint, options.timeout, key))]
        sides.append(_side("--reference", options, reference, place, key))
    plan = Plan(prompts, options.repeat, options.concurrency)
    complete = send(plan, sides, _say(options))
    return _result(
        options, plan, sides, complete, notes, [pair, *filter(None, [reference])]
    )


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.prompts is None:
        seed = time.time_ns() if options.seed is None else options.seed
        count = options.requests or 32
        return make_prompts(options.dataset, count, options.prompt_length, seed)
    try:
        found = read_prompts(options.prompts)[: options.requests]
        problem = "it has no prompt" if not found else None
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        message = f"argument --prompts: {options.prompts}: {problem}"
        refuse("U001", message=message, command="dspark-pd measure")
    if options.endpoint != "generate" and any(p.ids is not None for p in found):
        # Routers take token ids on /generate only.
        message = "argument --prompts: input_ids need --endpoint generate"
        refuse("U001", message=message, command="dspark-pd measure")
    return found


def _notes(options: argparse.Namespace, pair: Deployment) -> list[str]:
    if not pair.is_router:
        return [
            f"{pair.url} lists no workers: it is one server, or a router that does not "
            "tell; with one server nothing is handed over"
        ]
    if not pair.prefills:
        return [f"the router at {pair.url} has no prefill: it does not split requests"]
    if len(pair.prefills) > 1 and not options.each_prefill:
        return [
            f"the router has {len(pair.prefills)} prefills and does not tell which one "
            "served a request; --each-prefill measures each of them"
        ]
    return []


def _places(
    options: argparse.Namespace, pair: Deployment, key: str | None
) -> list[tuple[str | None, Where]]:
    router = Address(pair.url, options.endpoint, options.timeout, key)
    if not options.each_prefill:
        only = next(iter(pair.prefills)) if len(pair.prefills) == 1 else None
        return [(only, router)]
    if not (pair.prefills and pair.decodes):
        message = (
            "argument --each-prefill: the router at --url lists no prefill and decode"
        )
        refuse("U001", message=message, command="dspark-pd measure")
    decode = replace(router, url=pair.decodes[0])
    places: list[tuple[str | None, Where]] = []
    for prefill, listed in pair.prefills.items():
        port = listed or bootstrap_port(prefill, _LOOK_S, key)
        if port is None:
            refuse(
                "T108",
                option="--each-prefill",
                source=prefill,
                expected="prefill and decode engines that answer this machine",
                found="no answer from /server_info that has a bootstrap port",
                cause="only the router reaches the engines",
                hint="run it where the router runs, or leave --each-prefill out",
            )
        places.append((prefill, Engines(prefill, port, decode)))
    return places


def _side(
    option: str,
    options: argparse.Namespace,
    found: Deployment,
    places: Sequence[tuple[str | None, Where]],
    key: str | None,
) -> Side:
    """Send a first request to every place: what fails there would fail each time."""
    client = Client(options.endpoint, options.new_tokens, options.temperature)
    if options.endpoint != "generate":
        client = replace(client, model=_model(found, key))
    for _, where in places:
        first = _first(client, where)
        if not first.sized:
            client = replace(client, logprobs=True)
            first = _first(client, where)
        if first.error or not first.sized:
            _refuse_first(option, found, first)
    return Side("measured" if option == "--url" else "reference", places, client)


def _first(client: Client, where: Where) -> Served:
    [prompt] = make_prompts("repeat", 1, 64, time.time_ns())
    few = replace(client, new_tokens=_FIRST_TOKENS)
    return few.ask(where, prompt, 0, 0)


def _model(found: Deployment, key: str | None) -> str:
    try:
        listed = web.get(f"{found.url}/v1/models", _LOOK_S, key)
        return str(listed["data"][0]["id"])
    except (web.RequestFailed, LookupError, TypeError):
        return "default"


def _refuse_first(option: str, found: Deployment, first: Served) -> None:
    text, hint = first.error, f"curl {found.url}/health, and read the server's log"
    cause = "the server does not serve requests of this kind"
    if not text:
        text = "events without a count of their tokens, with and without logprobs"
        cause = "a router on the way drops the fields that tell"
        hint = "repeat with --endpoint generate, or measure without that router"
    elif first.status == 404:
        cause = "another kind of server, or one without this endpoint"
        hint = f"repeat with another --endpoint: {', '.join(ENDPOINTS)}"
    refuse(
        "T108",
        option=option,
        source=found.url,
        expected="a stream of events that tells the tokens of each verify step",
        found=text,
        cause=cause,
        hint=hint,
    )


def _say(options: argparse.Namespace) -> Callable[[str], None]:
    def say(text: str) -> None:
        if not options.quiet:
            print(f"[measure] {text}", file=sys.stderr, flush=True)

    return say


def _result(
    options: argparse.Namespace,
    plan: Plan,
    sides: Sequence[Side],
    complete: bool,
    notes: list[str],
    found: Sequence[Deployment],
) -> Result:
    mine = sides[0]
    measured = Measured(
        mine.served,
        sides[1].served if len(sides) > 1 else None,
        mine.seconds,
        sides[1].seconds if len(sides) > 1 else 0.0,
        len(plan.prompts) * len(mine.places) * plan.rounds,
    )
    notes = [*notes, *_remarks(measured, complete)]
    findings = diagnose(measured)
    data = as_data(measured, findings, options.asserts)
    data |= {"interrupted": not complete, "endpoint": options.endpoint}
    data["addresses"] = {d.url: dict(d.model) for d in found}
    problems = list(_write(options, measured, data, notes))
    names = ("measured", "reference")
    head = [f"{n:<10} {d.shown}" for n, d in zip(names, found, strict=False)]
    answered = f"{len(measured.good)} of {measured.planned} requests answered"
    lines = [*head, f"{'requests':<10} {answered}", ""]
    lost = complete and measured.planned > len(measured.served)
    told = failures(measured)
    told += [t for t in asserted(measured, options.asserts) if t.startswith("FAIL")]
    failed = bool(told or lost)
    code = exit_codes.DIFFERS if failed else exit_codes.OK
    code = problems[0].exit_code if problems else code
    lines += as_lines(measured, findings, options.asserts)
    return Result(
        exit_code=code if complete else exit_codes.INTERRUPTED,
        data=data,
        # Whatever the exit code of 1 stands for is told with -q as well.
        lines=told if options.quiet else lines,
        notes=notes,
        problems=problems,
        is_document=bool(told),
    )


def _remarks(measured: Measured, complete: bool) -> Iterator[str]:
    if not complete:
        yield "interrupted: the figures are of the requests that were answered until then"
    lost = measured.planned - len(measured.served)
    if complete and lost:
        yield f"{count(lost, 'request')} without an outcome: a fault of dspark-pd, please report it"
    for unread, where in (
        (measured.unread_steps, "--url"),
        (measured.reference_unread_steps, "--reference"),
    ):
        if not unread:
            continue
        yield (
            f"{count(unread, 'request')} to {where} came with merged events and no "
            "step's figure has them; use --endpoint generate, a lower --concurrency, or a server "
            "with --stream-interval 1"
        )
    same = measured.same_text
    if same is not None and same < 1:
        yield (
            f"{1 - same:.0%} of the texts differ from the reference: at temperature 0 "
            "batches can round differently; many that differ mean another model"
        )


def _write(
    options: argparse.Namespace,
    measured: Measured,
    data: dict[str, object],
    notes: list[str],
) -> Iterator[Problem]:
    """Write the files; what fails is returned, so that the report is still printed."""
    if options.save:
        yield from _write_one("--save", options.save, json.dumps(data, indent=1) + "\n")
    if options.plot:
        try:
            text = _plot(measured)
        except ValueError as error:
            notes.append(f"no plot was written: {error}")
        else:
            yield from _write_one("--plot", options.plot, text)


def _write_one(option: str, path: Path, text: str) -> Iterator[Problem]:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fields = {"option": option, "path": path, "detail": str(error)}
        yield Problem("F507", fields)


def _plot(measured: Measured) -> str:
    steps = measured.by_step()
    lines = {
        "measured": {n: f.accept_length for n, f in steps.items() if f.accept_length},
        "reference": {n: f.reference for n, f in steps.items() if f.reference},
    }
    drawn = {name: line for name, line in lines.items() if line}
    return draw(drawn, "Accept length by verify step")
