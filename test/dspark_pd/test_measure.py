"""``measure``: what a stream tells, the figures, the verdicts, and bad input.

Against the fake server of ``fake_stream``; the real engines and the real router are in
``test/registered/disaggregation/test_disaggregation_dspark_measure.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dspark_pd.measure.client import Served
from dspark_pd.measure.diagnosis import diagnose
from dspark_pd.measure.prompts import make_prompts, read_prompts
from dspark_pd.measure.report import Assertion
from dspark_pd.measure.statistics import Measured
from fake_stream import PAIR, Behaviour, FakeServer
from outcome import Outcome, Run

pytestmark = pytest.mark.unit

Start = Callable[..., FakeServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[FakeServer] = []

    def _start(**behaviour: object) -> FakeServer:
        behaviour.setdefault("workers", PAIR)
        servers.append(FakeServer(Behaviour(**behaviour)))  # type: ignore[arg-type]
        return servers[-1]

    yield _start
    for server in servers:
        server.close()


def unified(start: Start, **behaviour: object) -> FakeServer:
    return start(workers=None, **behaviour)


# -- what a stream tells ------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_steps_are_the_tokens_of_each_event(
    start: Start, run: Run, endpoint: str
) -> None:
    server = start(steps=lambda number: [5, 3, 1])
    found = run("measure", "--url", server.url, "--requests", 3, "--endpoint", endpoint)
    assert found.code == 0, found.err
    lengths = [step["accept_length"] for step in found.data["by_step"].values()]
    assert lengths == [5, 3, 1]
    # The first token is of prefill: in the mean, and in no step.
    assert found.data["accept_length"] == round(10 / 3, 4)
    assert found.data["completed"] == 3


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_logprobs_tell_where_a_router_drops_the_usage_of_events(
    start: Start, run: Run, endpoint: str
) -> None:
    server = start(steps=lambda number: [4, 2], counts=False)
    found = run("measure", "--url", server.url, "--requests", 2, "--endpoint", endpoint)
    lengths = [step["accept_length"] for step in found.data["by_step"].values()]
    assert lengths == [4, 2]
    assert [bool(asked.get("logprobs")) for asked in server.behaviour.asked] == [
        False,
        *[True] * 3,
    ]


def test_merged_events_are_in_the_mean_and_in_no_step(start: Start, run: Run) -> None:
    server = start(steps=lambda number: [5, 3, 1, 1], merge=2)
    found = run("measure", "--url", server.url, "--requests", 2)
    assert found.data["accept_length"] == 11 / 4
    assert found.data["by_step"] == {}
    assert found.data["unread_steps"] == 2
    assert any("merged events" in note for note in found.document["notes"])


def test_merged_events_of_the_reference_are_told(start: Start, run: Run) -> None:
    reference = unified(start, merge=2)
    options = ["--reference", reference.url, "--requests", 2]
    found = run("measure", "--url", start().url, *options)
    assert found.data["reference"]["unread_steps"] == 2
    note = "2 requests to --reference came with merged events"
    assert any(text.startswith(note) for text in found.document["notes"])


def test_sixteen_steps_have_figures_and_the_rest_one(start: Start, run: Run) -> None:
    server = start(steps=lambda number: [2] * 16 + [4] * 5)
    found = run("measure", "--url", server.url, "--requests", 1)
    assert list(found.data["by_step"]) == [*map(str, range(1, 17)), "17+"]
    assert found.data["by_step"]["17+"]["accept_length"] == 4
    assert found.data["by_step"]["17+"]["spec_verify_ct"] == 5


def test_tiers_are_named_by_where_most_of_a_prompt_was(start: Start, run: Run) -> None:
    # The first request asks what the server can do.
    tiers = [None, None, {"device": 64}, {"device": 40, "host": 50}]
    tiers += [{"device": 4, "storage": 90}, {"device": 10}]
    server = start(cached=lambda number: tiers[number])
    found = run("measure", "--url", server.url, "--requests", 5, "--concurrency", 1)
    counts = {name: f["requests"] for name, f in found.data["by_tier"].items()}
    assert counts == {"cold": 2, "device": 1, "host": 1, "storage": 1}


# -- figures beside a reference -----------------------------------------------------------


def test_every_figure_is_a_ratio_to_the_same_prompts(start: Start, run: Run) -> None:
    pair = start(steps=lambda number: [2, 5, 5])
    reference = unified(start, steps=lambda number: [4, 5, 5])
    found = run(
        "measure",
        *("--url", pair.url, "--reference", reference.url, "--requests", 4),
        *("--assert", "ratio.step.1==0.5", "--assert", "ratio.step.2>=1"),
        *("--assert", "same_text==0", "--assert", "loss_ends_at==2"),
    )
    assert found.code == 0, found.err
    assert found.data["ratio"] == round(13 / 15, 4)
    assert all(row["holds"] for row in found.data["asserts"])


def test_an_assert_that_does_not_hold_exits_with_1(start: Start, run: Run) -> None:
    server = start()
    options = ["measure", "--url", server.url, "--requests", 1]
    assert run(*options, "--assert", "accept_length>=3").code == 0
    assert run(*options, "--assert", "accept_length>=6").code == 1
    # No reference: there is no ratio, and what was not measured holds nothing.
    assert run(*options, "--assert", "ratio>=0.1").code == 1


@pytest.mark.parametrize(
    "text",
    [
        *("ratio", "ratio>x", "speed>=1", "ratio.steps>=1", "accept_length.step>=1"),
        *("ratio.tier.stroage>=1", "ratio.step.18>=1", "ratio.step.17>=1"),
        *("ratio.prompt.17-64>=1", "ratio.prefill.>=1"),
    ],
)
def test_an_assert_that_names_no_figure_is_refused(run: Run, text: str) -> None:
    found = run("measure", "--url", "http://127.0.0.1:1", "--assert", text)
    assert (found.code, found.codes) == (2, ["U001"])


def test_report_and_plot_are_written(start: Start, run: Run, tmp_path: Path) -> None:
    pair, reference = start(), unified(start)
    saved, plot = tmp_path / "m.json", tmp_path / "m.svg"
    options = ["--reference", reference.url, "--save", saved, "--plot", plot]
    found = run("measure", "--url", pair.url, "--requests", 2, *options)
    assert json.loads(saved.read_text()) == found.data
    drawn = ElementTree.parse(plot).getroot()
    assert len(drawn.findall("{*}polyline")) == 2


def test_a_file_that_cannot_be_written_loses_no_report(start: Start, run: Run) -> None:
    options = ["--requests", 1, "--save", "/dev/full", "--plot", "/proc/x.svg"]
    url = start().url
    found = run("measure", "--url", url, *options)
    assert (found.code, found.codes) == (6, ["F507", "F507"])
    assert found.data["completed"] == 1
    titles = [error["title"] for error in found.document["errors"]]
    assert titles == ["cannot write /dev/full", "cannot write /proc/x.svg"]
    shown = run("measure", "--url", url, *options, text=True)
    assert "1 of 1 requests answered" in shown.out and "F507" in shown.err


def test_quiet_prints_what_exit_code_1_stands_for(start: Start, run: Run) -> None:
    server = start(refuse=lambda number: "too busy" if number == 1 else None)
    options = ["measure", "--url", server.url, "--requests", 2, "-q"]
    options += ["--assert", "accept_length>=6", "--assert", "accept_length>=3"]
    found = run(*options, text=True)
    assert found.code == 1
    assert found.out.splitlines() == [
        "failed: 1x HTTP 400: too busy",
        "FAIL  accept_length>=6  (5)",
    ]
    good = run("measure", "--url", start().url, "--requests", 1, "-q", text=True)
    assert (good.code, good.out) == (0, "")


def test_the_table_shows_every_group(start: Start, run: Run) -> None:
    pair, reference = start(), unified(start)
    options = ["--reference", reference.url, "--requests", 2, "--assert", "ratio>=0.9"]
    found = run("measure", "--url", pair.url, *options, text=True)
    for words in (
        "2 of 2 requests answered",
        "step 1 ",
        "prompt of 65-128 tokens",
        "prompt cold",
        "prefill http://p:1",
        "same text as the reference: 100%",
        "No loss found.",
        "ok    ratio>=0.9  (1)",
    ):
        assert words in found.out
    assert "[measure] measured, round 1 of 1: 2 of 2 requests" in found.err


# -- diagnosis: the patterns; the real faults are in the e2e test -------------------------


def served(
    count: int, steps: list[int], *, tier: str = "", prefill: str = "p", first: int = 0
) -> list[Served]:
    cached = {tier: 90} if tier else {}
    return [
        Served(
            n,
            0,
            prefill=prefill,
            prompt_tokens=100,
            completion_tokens=1 + sum(steps),
            verify_steps=len(steps) if max(steps) > 1 else None,
            steps=tuple(steps),
            cached=cached,
        )
        for n in range(first, first + count)
    ]


GOOD, BAD = [4] * 20, [1, 2] * 10


@pytest.mark.parametrize(
    ("mine", "reference", "code"),
    [
        (served(4, GOOD), served(4, GOOD), None),
        (served(4, [1] * 8 + [4] * 12), served(4, GOOD), "MEASURE-HANDOFF"),
        (served(4, BAD), served(4, GOOD), "MEASURE-HANDOFF"),
        (served(4, BAD), served(4, BAD), None),
        (served(4, [1] * 5 + [2]), served(4, [1] * 5 + [2]), "MEASURE-DRAFT"),
        (
            served(4, GOOD) + served(4, BAD, tier="storage", first=4),
            served(8, GOOD),
            "MEASURE-STORAGE-WITHOUT-DRAFT",
        ),
        (
            served(4, GOOD) + served(4, BAD, tier="host", first=4),
            served(8, GOOD),
            "MEASURE-CACHE-WITHOUT-DRAFT",
        ),
        (
            served(4, GOOD) + served(4, BAD, prefill="q"),
            served(4, GOOD),
            "MEASURE-ONE-PREFILL",
        ),
        (served(4, [1] * 8), served(4, GOOD), "MEASURE-NO-SPECULATION"),
        (
            served(4, GOOD) + served(4, [1] * 8, first=4),
            served(8, GOOD),
            "MEASURE-SOME-WITHOUT-SPECULATION",
        ),
        (served(4, GOOD), None, None),
        (served(4, [1] * 16 + [4] * 9), None, "MEASURE-EARLY-STEPS"),
        (served(4, GOOD) + served(4, BAD, prefill="q"), None, "MEASURE-ONE-PREFILL"),
        (
            served(4, GOOD) + served(4, BAD, tier="storage"),
            None,
            "MEASURE-STORAGE-WITHOUT-DRAFT",
        ),
    ],
)
def test_a_pattern_names_its_cause(
    mine: list[Served], reference: list[Served] | None, code: str | None
) -> None:
    found = diagnose(Measured(mine, reference))
    assert [finding.code for finding in found] == ([code] if code else [])


def test_the_end_of_a_loss_is_told() -> None:
    healing = Measured(served(4, [1] * 8 + [4] * 12), served(4, GOOD))
    assert healing.loss_ends_at() == 9
    assert "ends at step 9" in diagnose(healing)[0].seen
    lasting = Measured(served(4, BAD), served(4, GOOD))
    assert lasting.loss_ends_at() is None
    assert "no end of it" in diagnose(lasting)[0].seen
    assert Measured(served(4, GOOD), served(4, GOOD)).loss_ends_at() == 1


# -- bad input ----------------------------------------------------------------------------


def test_an_engine_of_a_pair_is_no_router(start: Start, run: Run) -> None:
    model = {"disaggregation_mode": "decode"}
    engine = start(workers=None, model=model)
    found = run("measure", "--url", engine.url)
    assert (found.code, found.codes) == (3, ["T108"])
    assert "the decode engine itself" in found.document["errors"][0]["found"]


@pytest.mark.parametrize("kind", ["router", "prefill", "decode"])
def test_a_reference_that_splits_requests_is_refused(
    start: Start, run: Run, kind: str
) -> None:
    options = {"workers": None, "model": {"disaggregation_mode": kind}}
    other = start() if kind == "router" else start(**options)
    found = run("measure", "--url", start().url, "--reference", other.url)
    assert (found.code, found.codes) == (3, ["T108"])
    [error] = found.document["errors"]
    assert "started without --disaggregation-mode" in error["next"]
    assert "router" not in error["next"]


def test_a_router_over_whole_servers_is_a_reference(start: Start, run: Run) -> None:
    whole = start(workers=[{"url": "http://s:1", "worker_type": "regular"}])
    options = ["--reference", whole.url, "--requests", 1]
    assert run("measure", "--url", start().url, *options).code == 0


def test_a_closed_port_is_told_at_once(run: Run) -> None:
    found = run("measure", "--url", "http://127.0.0.1:9")
    assert (found.code, found.codes) == (3, ["T108"])


def test_one_server_is_measured_with_a_note(start: Start, run: Run) -> None:
    found = run("measure", "--url", unified(start).url, "--requests", 1)
    assert found.code == 0
    assert "nothing is handed over" in found.document["notes"][0]


def test_no_speculation_is_found(start: Start, run: Run) -> None:
    server = start(steps=lambda number: [1] * 6, verify_steps=False)
    found = run("measure", "--url", server.url, "--requests", 2)
    assert found.data["without_speculation"] == 1
    assert [f["code"] for f in found.data["findings"]] == ["MEASURE-NO-SPECULATION"]
    assert found.data["accept_length"] is None


def test_a_reference_of_another_model_is_refused(start: Start, run: Run) -> None:
    pair = start(model={"architectures": ["A"], "model_path": "/m/a"})
    other = unified(start, model={"architectures": ["B"], "model_path": "/m/a"})
    found = run("measure", "--url", pair.url, "--reference", other.url)
    assert (found.code, found.codes) == (3, ["T109"])


def test_a_reference_of_another_name_gets_a_note(start: Start, run: Run) -> None:
    pair = start(model={"architectures": ["A"], "model_path": "/m/a"})
    other = unified(
        start, letter="b", model={"architectures": ["A"], "model_path": "/x/b/"}
    )
    options = ["--reference", other.url, "--requests", 1]
    found = run("measure", "--url", pair.url, *options)
    notes = " ".join(found.document["notes"])
    assert "serves a and the reference b" in notes
    assert "100% of the texts differ" in notes


def test_prompts_that_are_too_long_fail_alone(start: Start, run: Run) -> None:
    text = "The input (9 tokens) is longer than the model's context length (4 tokens)"
    server = start(refuse=lambda number: text if number in (1, 3) else None)
    options = ["--requests", 4, "--concurrency", 1]
    found = run("measure", "--url", server.url, *options)
    assert (found.code, found.data["failed"], found.data["completed"]) == (1, 2, 2)
    [error] = found.data["errors"]
    assert error["requests"] == 2
    assert "shorter prompts" in error["error"]


def test_a_reference_that_answers_nothing_gives_no_verdict(
    start: Start, run: Run
) -> None:
    def measure(**how: bool) -> Outcome:
        # The first request asks what the server can do.
        reference = unified(start, refuse=lambda n: f"broken {n}" if n else None)
        options = ["--reference", reference.url, "--requests", 3, "--concurrency", 1]
        return run("measure", "--url", start().url, *options, **how)

    found = measure()
    assert (found.code, found.data["failed"]) == (1, 0)
    assert found.data["reference"]["failed"] == 3
    [error] = found.data["reference"]["errors"]
    assert error == {"requests": 3, "error": "HTTP 400: broken 1"}
    shown = measure(text=True)
    assert "failed on the reference: 3x HTTP 400: broken" in shown.out
    assert "No loss found" not in shown.out
    assert "Nothing was compared: no verdict." in shown.out


def test_failures_that_differ_by_numbers_are_one_line(start: Start, run: Run) -> None:
    words = ["a", "b", "c", "d", "e", "f", "f", "g"]
    for texts, lines in (
        ([f"{n} tokens of {2 * n}" for n in range(8)], ["8x HTTP 400: 0 tokens of 0"]),
        (words, ["2x HTTP 400: f", *(f"1x HTTP 400: {w}" for w in "abcd")]),
    ):
        server = start(refuse=lambda n, t=texts: t[n - 1] if n else None)
        options = ["--requests", len(texts), "--concurrency", 1]
        found = run("measure", "--url", server.url, *options, text=True)
        told = [t for t in found.out.splitlines() if t.startswith("failed: ")]
        rest = ["2x other errors; --json lists them"] if texts is words else []
        assert told == [f"failed: {line}" for line in [*lines, *rest]]


def test_streams_that_are_cut_keep_the_others(start: Start, run: Run) -> None:
    server = start(cut=lambda number: number == 2)
    options = ["--requests", 3, "--concurrency", 1]
    found = run("measure", "--url", server.url, *options)
    assert (found.code, found.data["failed"], found.data["completed"]) == (1, 1, 2)
    [error] = found.data["errors"]
    assert "after 6 tokens" in error["error"]
    assert "read the logs of the router" in error["error"]


def test_an_event_of_an_unknown_form_fails_its_request(start: Start, run: Run) -> None:
    server = start(finish_reason=lambda number: "stop" if number in (1, 3) else None)
    options = ["--requests", 3, "--concurrency", 1]
    found = run("measure", "--url", server.url, *options)
    assert (found.code, found.data["failed"], found.data["completed"]) == (1, 2, 1)
    assert "another form" in found.data["errors"][0]["error"]


def test_a_request_without_an_outcome_is_no_success(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_pd.verbs.measure.send", lambda *_: True)
    found = run("measure", "--url", start().url, "--requests", 3)
    assert (found.code, found.data["completed"]) == (1, 0)
    assert "3 requests without an outcome" in found.document["notes"][-1]


def test_a_router_that_drops_all_counts_is_refused(start: Start, run: Run) -> None:
    server = start(counts=False)
    # Nor logprobs.
    handler = server._server.RequestHandlerClass
    whole = handler._openai
    handler._openai = lambda self, size, total, last, body: whole(
        self, size, total, last, {**body, "logprobs": None}
    )
    found = run("measure", "--url", server.url, "--endpoint", "chat")
    assert (found.code, found.codes) == (3, ["T108"])
    assert "--endpoint generate" in found.document["errors"][0]["next"]


def test_a_server_without_counts_of_verify_steps_is_counted_by_events(
    start: Start, run: Run
) -> None:
    server = start(steps=lambda number: [5, 2], verify_steps=False)
    found = run("measure", "--url", server.url, "--requests", 1)
    assert found.data["accept_length"] == 4


def test_a_key_is_asked_for(
    start: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(key="secret")
    found = run("measure", "--url", server.url)
    assert (found.code, found.codes) == (3, ["T108"])
    assert "--api-key-env" in found.document["errors"][0]["next"]
    monkeypatch.setenv("KEY", "secret")
    options = ["--requests", 1, "--api-key-env", "KEY"]
    assert run("measure", "--url", server.url, *options).code == 0


@pytest.mark.parametrize(
    "option",
    [
        *(f"--requests={count}" for count in ("0", "x", "-1", 10**23)),
        *(f"--temperature={value}" for value in ("-1", "nan", "inf", "x")),
    ],
)
def test_numbers_are_checked(run: Run, option: str) -> None:
    found = run("measure", "--url", "http://127.0.0.1:9", option)
    assert (found.code, found.codes) == (2, ["U001"])


def test_each_prefill_needs_engines_that_answer(start: Start, run: Run) -> None:
    workers = [{**worker, "bootstrap_port": None} for worker in PAIR]
    workers[0]["url"] = "http://127.0.0.1:9"
    server = start(workers=workers)
    found = run("measure", "--url", server.url, "--each-prefill")
    assert (found.code, found.codes) == (3, ["T108"])
    assert "only the router reaches" in found.document["errors"][0]["cause"]


def test_an_interrupted_run_prints_what_is_known(start: Start, tmp_path: Path) -> None:
    release = threading.Event()
    release.set()
    server = start(wait=release)
    saved = tmp_path / "m.json"
    command = [sys.executable, "-m", "dspark_pd", "measure", "--url", server.url]
    command += ["--requests", "200", "--concurrency", "1", "--save", str(saved)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 30
        while len(server.behaviour.asked) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        release.clear()  # From now on streams hang before their end.
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        release.set()
        process.kill()
    assert process.returncode == 130, err
    assert "step 1 " in out
    assert "interrupted: the figures are of the requests" in err
    assert json.loads(saved.read_text())["interrupted"] is True
    assert 0 < json.loads(saved.read_text())["completed"] < 200


# -- prompts ------------------------------------------------------------------------------


def test_made_prompts_depend_on_the_seed_alone() -> None:
    first = make_prompts("repeat", 3, 100, 1)
    assert first == make_prompts("repeat", 3, 100, 1)
    assert first != make_prompts("repeat", 3, 100, 2)
    assert all(50 <= len(p.text or "") <= 100 for p in first)
    text = first[0].text or ""
    period = text.index("|") + 1
    assert text[period:].startswith(text[: len(text) - period][:20])


@pytest.mark.parametrize("dataset", ["repeat", "random"])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_made_prompts_can_be_short(dataset: str, length: int) -> None:
    texts = [p.text or "" for p in make_prompts(dataset, 5, length, 1)]
    assert all(1 <= len(text) <= length for text in texts)


def test_a_line_of_prompts_ends_at_a_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"text": "a\u2028b"}\r\nplain\x85words\n'.encode())
    assert [p.text for p in read_prompts(path)] == ["a\u2028b", "plain\x85words"]


def test_prompts_of_a_file(tmp_path: Path, start: Start, run: Run) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ["plain words", '{"text": "t"}', '"a string"', '{"input_ids": [1, 2]}']
    lines.append('{"messages": [{"role": "user", "content": "hi"}]}')
    path.write_text("\n".join(lines) + "\n\n")
    assert len(read_prompts(path)) == 5
    server = start()
    options = ["--prompts", path, "--concurrency", 1]
    assert run("measure", "--url", server.url, *options).data["completed"] == 5
    bodies = server.behaviour.asked[1:]
    assert [b.get("text", b.get("input_ids")) for b in bodies] == [
        "plain words",
        "t",
        "a string",
        [1, 2],
        "hi",
    ]


@pytest.mark.parametrize("line", ['{"x": 1}', "{broken", ""])
def test_a_file_without_prompts_is_refused(
    tmp_path: Path, start: Start, run: Run, line: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    found = run("measure", "--url", start().url, "--prompts", path)
    assert (found.code, found.codes) == (2, ["U001"])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_token_ids_need_the_endpoint_on_which_routers_take_them(
    tmp_path: Path, start: Start, run: Run, endpoint: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2]}')
    options = ["--prompts", path, "--endpoint", endpoint]
    found = run("measure", "--url", start().url, *options)
    assert (found.code, found.codes) == (2, ["U001"])
    text = found.document["errors"][0]["found"]
    assert text.endswith("need --endpoint generate")


def test_assertions_compare() -> None:
    figures = {"ratio": 0.98, "ratio.prefill.http://p:1": 0.5}
    assert Assertion.parse("ratio>=0.98").holds(figures)
    assert not Assertion.parse("ratio > 0.98").holds(figures)
    assert Assertion.parse("ratio.prefill.http://p:1<0.6").holds(figures)
