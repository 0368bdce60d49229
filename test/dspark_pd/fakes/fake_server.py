"""Stands in for an engine or a router: same command line, same HTTP surface.

Started as `fake_server.py -m MODULE --port N ...`. What it does is chosen with
environment variables: FAKE_EXIT (print it and exit 3), FAKE_NEVER_READY, FAKE_STUBBORN
(ignore SIGTERM and keep a child that does too), FAKE_ERROR (answer 500).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SEEN: list[dict] = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/seen":
            self._answer(200, json.dumps(SEEN))
        else:
            self._answer(503 if os.environ.get("FAKE_NEVER_READY") else 200, "ok")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        SEEN.append(body)
        if os.environ.get("FAKE_ERROR"):
            self._answer(500, "a fake error")
        elif self.path.endswith("chat/completions"):
            self._answer(200, _stream(), "text/event-stream")
        elif body.get("stream"):
            event = f"data: {json.dumps(_generate(body))}\n\ndata: [DONE]\n\n"
            self._answer(200, event, "text/event-stream")
        else:
            self._answer(200, json.dumps(_generate(body)))


def _generate(body: dict) -> dict:
    new = body["sampling_params"]["max_new_tokens"]
    prompt = body["input_ids"]
    return {
        "text": "",
        "output_ids": [prompt[0]] * new,
        "meta_info": {
            "prompt_tokens": len(prompt),
            "completion_tokens": new,
            "spec_verify_ct": 2,
            "cached_tokens": 3,
            "cached_tokens_details": {"device": 3, "host": 0},
        },
    }


def _stream() -> str:
    pieces = [{"content": "he"}, {"content": "y"}, {}]
    lines = [
        "data: "
        + json.dumps(
            {"choices": [{"delta": p, "finish_reason": None if p else "stop"}]}
        )
        for p in pieces
    ]
    return "\n\n".join([*lines, "data: [DONE]", ""])


def main() -> None:
    print("fake server with", sys.argv[1:], flush=True)
    if text := os.environ.get("FAKE_EXIT"):
        print(text, flush=True)
        sys.exit(3)
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", _STUBBORN_CHILD])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever()


_STUBBORN_CHILD = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep({60})
"""

if __name__ == "__main__":
    time.sleep(float(os.environ.get("FAKE_DELAY", "0")))
    main()
