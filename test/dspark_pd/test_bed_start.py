"""Start, readiness, failure and stop of servers, with real but fake ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bed_fakes import use_fake_servers
from dspark_pd.bed import Bed, BedError, Client, EngineSpec, RouterSpec
from dspark_pd.bed.ports import claim_port, free_port

pytestmark = pytest.mark.unit

MODEL, DRAFT = Path("/models/target"), Path("/models/draft")


@pytest.fixture
def quiet_bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    use_fake_servers(monkeypatch, tmp_path)
    said: list[str] = []
    bed = Bed("t", folder=tmp_path / "logs", say=said.append, start_timeout_s=20)
    bed.said = said
    return bed


def test_a_pair_behind_a_router(quiet_bed: Bed) -> None:
    with quiet_bed as bed:
        prefill, decode = bed.start(
            [
                EngineSpec("p", "prefill", MODEL, DRAFT),
                EngineSpec("d", "decode", MODEL, DRAFT),
            ]
        )
        router = bed.start_router(
            RouterSpec("r", [prefill.endpoint], [decode.endpoint])
        )
        bed.assert_healthy()
        replies = Client.router(router).generate([[5, 6], [7]], [3, 4])
        pids = [pid for server in bed.servers for pid in server.pids()]
        assert len(pids) >= 3
    assert [reply.output_ids for reply in replies] == [(5, 5, 5), (7, 7, 7, 7)]
    assert not any(server.pids() for server in (prefill, decode, router))
    assert not bed.folder.exists()


def test_the_router_is_told_where_the_engines_are(quiet_bed: Bed) -> None:
    with quiet_bed as bed:
        prefill, decode = bed.start(
            [EngineSpec("p", "prefill", MODEL), EngineSpec("d", "decode", MODEL)]
        )
        router = bed.start_router(
            RouterSpec("r", [prefill.endpoint], [decode.endpoint])
        )
        argv = router.argv
    at = argv.index("--prefill")
    assert argv[at + 1 : at + 3] == [prefill.url, str(prefill.bootstrap_port)]
    assert argv[argv.index("--decode") + 1] == decode.url
    assert argv[argv.index("--health-check-interval-secs") + 1] == "2"
    assert prefill.bootstrap_port != prefill.port != decode.port


def test_an_engine_that_ends_while_it_starts(
    quiet_bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = EngineSpec("good", "unified", MODEL)
    bad = EngineSpec(
        "bad", "unified", MODEL, env={"FAKE_EXIT": "boom\nNo module named 'nixl'"}
    )
    with pytest.raises(BedError) as caught, quiet_bed as bed:
        bed.start([good, bad])
    error = caught.value
    assert "bad ended while it started" in str(error)
    assert "exit status 3" in error.found
    assert "NIXL" in error.cause
    assert "boom" in error.log_tail
    assert not quiet_bed.servers
    assert (quiet_bed.folder / "bad.log").exists()
    assert any(str(quiet_bed.folder) in line for line in quiet_bed.said)


def test_an_engine_that_never_gets_ready(tmp_path: Path, quiet_bed: Bed) -> None:
    quiet_bed._limit_s = 2.0
    spec = EngineSpec("slow", "unified", MODEL, env={"FAKE_NEVER_READY": "1"})
    with pytest.raises(BedError, match="not ready after 2 s"), quiet_bed as bed:
        bed.start([spec])
    assert not quiet_bed.servers


def test_a_dead_engine_is_named(quiet_bed: Bed) -> None:
    with pytest.raises(BedError, match="e is not healthy"), quiet_bed as bed:
        (engine,) = bed.start([EngineSpec("e", "unified", MODEL)])
        engine.kill()
        bed.assert_healthy()


def test_a_restarted_engine_has_a_log_of_its_own(quiet_bed: Bed) -> None:
    spec = EngineSpec("e", "unified", MODEL)
    with quiet_bed as bed:
        (first,) = bed.start([spec])
        bed.stop(first)
        (second,) = bed.start([spec])
        assert first.log != second.log
        assert bed.servers == [second]


def test_direct_sends_one_room_to_both(quiet_bed: Bed) -> None:
    from dspark_pd.bed import web

    with quiet_bed as bed:
        prefill, decode = bed.start(
            [EngineSpec("p", "prefill", MODEL), EngineSpec("d", "decode", MODEL)]
        )
        Client.direct(prefill, decode).generate([[1], [2]], 2)
        seen = [web.call(f"{engine.url}/seen") for engine in (prefill, decode)]
    rooms = [sorted(body["bootstrap_room"] for body in bodies) for bodies in seen]
    assert rooms[0] == rooms[1]
    assert len(set(rooms[0])) == 2
    assert {b["bootstrap_port"] for b in seen[1]} == {prefill.bootstrap_port}


def test_a_failed_request_shows_the_answer(quiet_bed: Bed) -> None:
    with pytest.raises(BedError, match="HTTP 500: a fake error"), quiet_bed as bed:
        spec = EngineSpec("e", "unified", MODEL, env={"FAKE_ERROR": "1"})
        (engine,) = bed.start([spec])
        Client.unified(engine).generate([[1]], 2)


def test_chat_streams_pieces(quiet_bed: Bed) -> None:
    with quiet_bed as bed:
        (engine,) = bed.start([EngineSpec("e", "unified", MODEL)])
        message = [{"role": "user", "content": "hi"}]
        reply = Client.unified(engine).chat(message, max_tokens=4)
    assert reply.pieces == ("he", "y")
    assert (reply.text, reply.finish_reason) == ("hey", "stop")


def test_a_taken_port_is_refused_before_anything_starts(quiet_bed: Bed) -> None:
    with socket.socket() as taken, quiet_bed as bed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BedError, match=f"{port} is in use") as caught:
            bed.start([EngineSpec("e", "unified", MODEL, port=port)])
        assert caught.value.usage
        assert not bed.servers


def test_ports_are_handed_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    every_third = set(range(10_000, 21_000, 3))  # leaves blocks above 21000 only
    monkeypatch.setattr("dspark_pd.bed.ports._handed_out", every_third)
    block = free_port(range(1, 4))
    assert block > 20_990
    ports = [free_port() for _ in range(50)]
    assert len({*ports, *range(block, block + 4)}) == 54
    with pytest.raises(BedError, match="not a TCP port"):
        claim_port(70_000, "--port")
