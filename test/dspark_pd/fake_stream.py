"""A server that streams as SGLang and its router do, for what real ones cannot be made
to do on demand: streams that are cut, fields that are dropped, prompts that are refused.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Steps = Callable[[int], list[int]]


@dataclass
class Behaviour:
    """What one fake server does; ``steps`` gives the tokens of each step of a request."""

    steps: Steps = lambda number: [5, 5, 4]
    workers: list[dict[str, Any]] | None = None
    model: dict[str, Any] = field(default_factory=lambda: {"model_path": "/m/tiny"})
    cached: Callable[[int], dict[str, int] | None] = lambda number: None
    verify_steps: bool = True
    counts: bool = True
    cut: Callable[[int], bool] = lambda number: False
    refuse: Callable[[int], str | None] = lambda number: None
    finish_reason: Callable[[int], Any] = lambda number: None
    """In place of the form that SGLang gives it."""
    merge: int = 1
    letter: str = "a"
    wait: threading.Event | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    key: str | None = None


class _Handler(http.server.BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        ours = self.behaviour
        answers: dict[str, Any] = {"/get_model_info": ours.model}
        if ours.workers is not None:
            answers["/workers"] = {"workers": ours.workers}
        if ours.key and self.headers["Authorization"] != f"Bearer {ours.key}":
            return self._answer(401, {"error": "no key"})
        known = self.path in answers
        return self._answer(200 if known else 404, answers.get(self.path, {}))

    def _answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_POST(self) -> None:
        ours = self.behaviour
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        number = len(ours.asked)
        ours.asked.append({"path": self.path, **body})
        text = ours.refuse(number)
        if text:
            return self._answer(400, {"error": {"message": text}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events = list(self._events(number, body))
        if ours.cut(number):
            events = events[: len(events) // 2]
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()
        if ours.wait:
            ours.wait.wait(20)
        if not ours.cut(number):
            self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _events(self, number: int, body: dict[str, Any]):
        ours = self.behaviour
        steps = ours.steps(number)
        sizes = [1]
        for at in range(0, len(steps), ours.merge):
            sizes.append(sum(steps[at : at + ours.merge]))
        total = 0
        for at, size in enumerate(sizes):
            total += size
            last = at == len(sizes) - 1
            if self.path == "/generate":
                yield self._native(number, total, len(steps) if last else None)
            else:
                yield self._openai(size, total, last, body)

    def _native(self, number: int, total: int, steps: int | None) -> dict[str, Any]:
        ours = self.behaviour
        meta: dict[str, Any] = {
            "prompt_tokens": 100,
            "completion_tokens": total,
            "finish_reason": None if steps is None else {"type": "stop"},
        }
        if steps is not None and ours.finish_reason(number):
            meta["finish_reason"] = ours.finish_reason(number)
        if ours.cached(number):
            meta["cached_tokens_details"] = ours.cached(number)
        if steps and ours.verify_steps:
            meta["spec_verify_ct"] = steps
        return {
            "text": ours.letter * total,
            "output_ids": [1] * total,
            "meta_info": meta,
        }

    def _openai(
        self, size: int, total: int, last: bool, body: dict[str, Any]
    ) -> dict[str, Any]:
        ours = self.behaviour
        chat = self.path.endswith("chat/completions")
        text = ours.letter * size
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if body.get("logprobs"):
            name = "content" if chat else "tokens"
            choice["logprobs"] = {name: [{}] * size}
        event: dict[str, Any] = {"choices": [choice]}
        if ours.counts:
            event["usage"] = {"prompt_tokens": 100, "completion_tokens": total}
        return event


class FakeServer:
    """Runs until it is closed; ``url`` is its address."""

    def __init__(self, behaviour: Behaviour) -> None:
        handler = type("Handler", (_Handler,), {"behaviour": behaviour})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.behaviour = behaviour
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        loop = self._server.serve_forever
        threading.Thread(target=loop, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


PAIR = [
    {"url": "http://p:1", "worker_type": "prefill", "bootstrap_port": 9},
    {"url": "http://d:2", "worker_type": "decode"},
]
