"""Processes with nothing to run give the core away, and wake for what comes."""

from __future__ import annotations

import pickle
from threading import Timer

import pytest

zmq = pytest.importorskip("zmq")

from sglang_cpu_reference import idle  # noqa: E402


@pytest.fixture
def sockets():
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.bind("inproc://requests")
    receiver.connect("inproc://requests")
    yield sender, receiver
    context.destroy(linger=0)


class Controller:
    """SGLang's loop in short: ask without waiting, until it is interrupted."""

    def __init__(self, socket, method):
        self.recv_from_tokenizer, self.method = socket, method

    def event_loop(self):
        self.got = getattr(self.recv_from_tokenizer, self.method)(zmq.NOBLOCK)


@pytest.mark.parametrize(
    ("method", "request_of"),
    [("recv", lambda sent: sent), ("recv_pyobj", pickle.loads)],
)
def test_a_look_lasts_until_a_request_is_there(
    sockets, monkeypatch, method, request_of
):
    monkeypatch.setattr(idle, "LOOK_MS", 20_000)
    sender, receiver = sockets
    controller = Controller(receiver, method)
    sent = pickle.dumps("request")
    Timer(0.05, sender.send, [sent]).start()
    idle.listen_patiently(Controller.event_loop, controller)
    assert controller.got == request_of(sent)


def test_a_look_that_finds_nothing_ends_as_before(sockets, monkeypatch):
    """So the loop comes round and feeds its watchdog."""
    monkeypatch.setattr(idle, "LOOK_MS", 1)
    with pytest.raises(zmq.Again):
        idle.listen_patiently(Controller.event_loop, Controller(sockets[1], "recv"))
