"""The doctor and running engines: what they answer, and what it makes of it."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor_bench import QWEN, Bench
from dspark_pd.doctor import servers
from dspark_pd.doctor.fields import FIELDS
from outcome import Run

pytestmark = pytest.mark.unit


class _Server(http.server.BaseHTTPRequestHandler):
    """Answers as a prefill engine and as its bootstrap server."""

    answers: ClassVar[dict] = {}
    header: str | None = None
    key: str | None = None
    page: bytes | None = None

    def do_GET(self) -> None:
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}":
            self.send_error(401)
            return
        known = self.path.partition("?")[0] in self.answers
        body = json.dumps(self.answers.get(self.path.partition("?")[0])).encode()
        self.send_response(200 if known else 404)
        if self.page:
            self.send_header("Content-Type", "text/html")
            body = self.page
        if self.header and self.path.startswith("/route"):
            self.send_header("X-SGLang-Peer-Description", self.header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator:
    servers = []

    def start(args: dict, header: str | None = None, key: str | None = None) -> str:
        handler = type("Handler", (_Server,), {"header": header, "key": key})
        server = http.server.HTTPServer(("127.0.0.1", 0), handler)
        args = {"disaggregation_bootstrap_port": server.server_port, **args}
        handler.answers = {"/server_info": args, "/route": {}}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        address = f"http://127.0.0.1:{server.server_port}"
        start.handlers[address] = handler
        return address

    start.handlers = {}
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_running_engines(serve, bench: Bench, run: Run) -> None:
    args = {
        "model_path": bench.model("qwen", QWEN),
        "page_size": 64,
        "speculative_algorithm": None,
        "version": "0.5.23",
    }
    published = json.dumps({"version": 2, "page_size": 64, "mode": "none"})
    prefill = serve({**args, "disaggregation_mode": "prefill"}, published)
    decode = serve({**args, "disaggregation_mode": "decode"})
    outcome = run("doctor", "--prefill", prefill, "--decode", decode)
    assert outcome.code == 0, outcome.out


def test_what_a_running_prefill_publishes_counts_most(serve, run: Run) -> None:
    published = json.dumps({"version": 2, "page_size": 1, "mode": "none"})
    prefill = serve({"page_size": None, "tp_size": 1}, published)
    decode = serve({"page_size": 64, "tp_size": 1})
    outcome = run("doctor", "--prefill", prefill, "--decode", decode, "--json")
    codes = [finding["code"] for finding in outcome.data["findings"]]
    assert (outcome.code, codes[0]) == (1, "PD-PAGE-SIZE")


def test_a_prefill_without_this_agreement_is_named(serve, run: Run) -> None:
    prefill, decode = serve({"tp_size": 1}), serve({"tp_size": 1})
    outcome = run("doctor", "--prefill", prefill, "--decode", decode, "--json")
    assert "DOC-UNDESCRIBED" in [f["code"] for f in outcome.data["findings"]]


SHOWN = {
    "version": 2,
    "page_size": 64,
    "mode": "native",
    "algorithm": "DSPARK",
    "draft_weights": "aaaa",
}


def showing(description: dict | None, **args) -> dict:
    state = {"peer_description": description} if description else {"tp_size": 1}
    return {"version": "0.5.23", "tp_size": 1, "internal_states": [state], **args}


def codes_of(run: Run, prefill: str, decode: str) -> list[str]:
    outcome = run("doctor", "--prefill", prefill, "--decode", decode, "--json")
    return [finding["code"] for finding in outcome.data["findings"]]


def test_what_running_engines_show_counts_most(serve, run: Run) -> None:
    """Not the page size of their arguments, and no guess about their environment."""
    decode = serve(showing({**SHOWN, "mode": "tail"}, page_size=1))
    assert codes_of(run, serve(showing(SHOWN, page_size=16)), decode) == []
    tail = {**SHOWN, "mode": "tail", "algorithm": None}
    assert codes_of(run, serve(showing(tail)), decode) == ["DOC-TAIL-RADIX"]
    native = serve(showing(SHOWN))
    assert codes_of(run, serve(showing(tail)), native)[0] == "PD-MODE"
    paged = serve(showing({**SHOWN, "page_size": 16}))
    assert codes_of(run, native, paged) == ["PD-PAGE-SIZE"]


def test_a_patched_engine_and_one_that_is_not(serve, run: Run) -> None:
    """As the patched one will see it."""
    stock = {"speculative_algorithm": "DSPARK", "page_size": 64}
    patched, unpatched = serve(showing(SHOWN)), serve(showing(None, **stock))
    assert codes_of(run, unpatched, patched)[0] == "PD-UNDESCRIBED-PREFILL"
    both = codes_of(run, patched, unpatched)
    assert "DOC-UNDESCRIBED" in both


def test_two_engines_without_the_agreement_are_compared(serve, run: Run) -> None:
    drafts = serve(showing(None, speculative_algorithm="DSPARK"))
    codes = codes_of(run, serve(showing(None)), drafts)
    assert codes[0] == "PD-COLD-DRAFT"
    assert codes.count("DOC-UNDESCRIBED") == 2


# -- what is no engine, or no engine yet ------------------------------------------------


def assert_not_reachable(run: Run, address: str, found: str) -> None:
    """No finding on a pair of which nothing is known, and both engines are named."""
    outcome = run("doctor", "--prefill", address, "--decode", address)
    assert (outcome.code, outcome.codes) == (3, ["T106", "T106"])
    titles = [error["title"] for error in outcome.document["errors"]]
    assert titles == [
        f"the {role} engine at {address} is not reachable"
        for role in ("prefill", "decode")
    ]
    assert found in outcome.document["errors"][0]["found"]
    assert outcome.data == {}


def test_json_without_a_server_argument_is_no_engine(serve, run: Run) -> None:
    address = serve({})
    serve.handlers[address].answers = {"/server_info": {"detail": "Not Found"}}
    assert_not_reachable(run, address, "without a server argument (detail)")


@pytest.mark.parametrize("answer", [[], "text", None])
def test_a_server_that_is_not_an_engine_is_not_reachable(
    serve, run: Run, answer
) -> None:
    address = serve({})
    # Any JSON but an object of arguments.
    serve.handlers[address].answers["/server_info"] = answer
    assert_not_reachable(run, address, "no JSON object")


def test_a_web_page_is_refused_as_an_engine(serve, run: Run) -> None:
    address = serve({})
    serve.handlers[address].page = b"<html>not here</html>"
    assert_not_reachable(run, address, "(text/html, 21 bytes)")


def test_an_argument_of_a_wrong_type_is_not_reachable(serve, run: Run) -> None:
    assert_not_reachable(run, serve({"tp_size": "four"}), "tp_size 'four', not a whole")


def test_another_programs_404(serve, run: Run) -> None:
    address = serve({})
    serve.handlers[address].answers.clear()
    assert_not_reachable(run, address, "HTTP Error 404")


def test_a_port_that_does_not_speak_http(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-nobody\r\n")

        threading.Thread(target=answer, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert_not_reachable(run, address, "SSH-2.0-nobody")


def test_an_engine_that_does_not_answer(run: Run) -> None:
    assert_not_reachable(run, "http://127.0.0.1:9", "refused")


# -- answers of another shape -----------------------------------------------------------


@pytest.mark.parametrize("port", [None, -1, 99999999])
def test_a_bootstrap_port_that_is_not_a_port(serve, run: Run, port: object) -> None:
    prefill = serve({"tp_size": 1, "disaggregation_bootstrap_port": port})
    codes = codes_of(run, prefill, serve({"tp_size": 1}))
    assert "DOC-BOOTSTRAP" in codes


@pytest.mark.parametrize("states", [{"tp_size": 1}, [1, None, "x"], "text", 4])
def test_states_of_another_shape_tell_nothing(serve, run: Run, states: object) -> None:
    address = serve({"tp_size": 1, "version": 5, "internal_states": states})
    outcome = run("doctor", "--prefill", address, "--decode", address)
    assert outcome.code == 0, outcome.out


@pytest.mark.parametrize(
    "description", [{"version": 2, "tp": "four", "pp": []}, {"version": 1, "mode": {}}]
)
def test_a_description_of_another_shape_is_named(
    serve, run: Run, description: dict
) -> None:
    pair = serve(showing(description)), serve(showing({**SHOWN, "tp": 1, "pp": 1}))
    for prefill, decode in (pair, pair[::-1]):
        outcome = run("doctor", "--prefill", prefill, "--decode", decode)
        assert outcome.code == 1
        assert outcome.data["findings"][0]["code"].startswith("PD-")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
NAMES = [*FIELDS, "version", "internal_states", "server_args", "environ"]


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.dictionaries(st.sampled_from(NAMES), ANY, max_size=6), ANY)
def test_no_answer_breaks_the_doctor(
    run: Run, tmp_path: Path, answer: dict, state: object
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("made up")

    shown = {**answer, "internal_states": [{"peer_description": state}, state]}
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "server_info", lambda *_: dict(shown))
        patch.setattr(servers._opener, "open", unreachable)
        for sources in (["http://h:1"] * 2, [file, file], ["http://h:1", file]):
            outcome = run("doctor", "--prefill", sources[0], "--decode", sources[1])
            assert outcome.code in (0, 1, 2, 3), outcome.out


# -- engines that do not let everybody in -----------------------------------------------


def test_an_engine_with_an_api_key(
    serve, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve({"tp_size": 1}, key="s3cret")
    pair = ["--prefill", address, "--decode", address]
    told = run("doctor", *pair)
    assert told.codes == ["T106", "T106"]
    for error in told.document["errors"]:
        assert "asks for an API key (HTTP 401)" in error["found"]
        assert "--api-key-env NAME" in error["next"]
    monkeypatch.setenv("ENGINE_KEY", "wrong")
    refused = run("doctor", *pair, "--api-key-env", "ENGINE_KEY")
    assert "refuses the API key" in refused.document["errors"][0]["found"]
    monkeypatch.setenv("ENGINE_KEY", "s3cret")
    let_in = run("doctor", *pair, "--api-key-env", "ENGINE_KEY")
    assert let_in.data["findings"]
    assert "s3cret" not in let_in.out + refused.out + told.out


@pytest.mark.parametrize("value", [None, "", "two\nlines"])
def test_an_unset_api_key_variable_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("ENGINE_KEY", raising=False)
    else:
        monkeypatch.setenv("ENGINE_KEY", value)
    address = "http://127.0.0.1:9"
    outcome = run(
        *("doctor", "--prefill", address, "--decode", address),
        *("--api-key-env", "ENGINE_KEY"),
    )
    assert (outcome.code, outcome.codes) == (2, ["U001"])
    assert "ENGINE_KEY" in outcome.document["errors"][0]["found"]


def test_a_release_without_the_agreement_is_not_told_to_apply(serve, run: Run) -> None:
    old, new = (serve({"tp_size": 1, "version": v}) for v in ("0.5.19", "0.5.23"))
    fixes = {}
    for address in (old, new):
        outcome = run("doctor", "--prefill", address, "--decode", address)
        found = [f for f in outcome.data["findings"] if f["code"] == "DOC-UNDESCRIBED"]
        fixes[address] = found[0]["fix"]
    assert fixes[new].startswith("apply sglang-dspark-pd")
    assert fixes[old].startswith("run one of SGLang 0.5.20 to 0.5.23")
