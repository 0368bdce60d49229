"""Sends prompts to an engine or a pair and keeps what a comparison needs.

`output_ids` tell whether decoding stayed lossless. They say nothing about the draft:
verification repairs every wrong proposal. `verify_steps` tell whether the draft had its
context, so a comparison looks at both.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark_pd.bed import web
from dspark_pd.measure.client import Reading

if TYPE_CHECKING:
    from dspark_pd.bed.bed import Engine, Router

Send = Callable[[dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """One finished request."""

    output_ids: tuple[int, ...]
    meta: Mapping[str, Any]
    text: str = ""
    steps: tuple[int, ...] | None = None
    """Tokens of each verify step, of a streamed reply; see ``measure.client``."""

    @property
    def prompt_tokens(self) -> int:
        return int(self.meta["prompt_tokens"])

    @property
    def completion_tokens(self) -> int:
        return int(self.meta["completion_tokens"])

    @property
    def verify_steps(self) -> int:
        """Target verify passes of this request; 0 without speculation."""
        return int(self.meta.get("spec_verify_ct") or 0)

    @property
    def accept_length(self) -> float | None:
        """Completion tokens per verify pass, as SGLang reports it; None without."""
        return self.completion_tokens / self.verify_steps if self.verify_steps else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill found in one of its caches."""
        return int(self.meta.get("cached_tokens") or 0)

    @property
    def cached_details(self) -> dict[str, Any]:
        """Cached tokens by tier: `device`, `host`, and `storage` where reported."""
        return dict(self.meta.get("cached_tokens_details") or {})

    @property
    def sha256(self) -> str:
        """Digest of the output ids as little-endian 32-bit integers."""
        packed = struct.pack(f"<{len(self.output_ids)}i", *self.output_ids)
        return hashlib.sha256(packed).hexdigest()


class Client:
    """Greedy requests to one address; see the three constructors."""

    def __init__(self, send: Send, url: str | None = None) -> None:
        self._send = send
        self._url = url

    @classmethod
    def unified(cls, engine: Engine) -> Client:
        """An engine that prefills and decodes itself."""
        url = f"{engine.url}/generate"
        return cls(lambda body, limit: web.call(url, body, limit), engine.url)

    @classmethod
    def router(cls, router: Router) -> Client:
        """A pair behind a router, which chooses the engines of each request."""
        url = f"{router.url}/generate"
        return cls(lambda body, limit: web.call(url, body, limit), router.url)

    @classmethod
    def direct(cls, prefill: Engine, decode: Engine) -> Client:
        """A pair without a router: the same request to both, one room number."""

        def send(body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            return _dual_post(prefill, decode, body, timeout_s)

        return cls(send)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        parallel: int = 8,
        timeout_s: float = 120.0,
        stream: bool = False,
        **sampling: Any,
    ) -> list[Reply]:
        """Replies in the order of `prompts` (token ids), `parallel` at a time.

        Greedy and with `ignore_eos`, so every reply has `max_new_tokens` tokens (one
        number for all, or one per prompt);
        `sampling` adds or replaces sampling parameters. With `stream` a reply also has
        its steps. Raises BedError when one
        request fails.
        """
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        params = {"temperature": 0, "ignore_eos": True, **sampling}

        def one(prompt: Sequence[int], new: int) -> Reply:
            body = {
                "input_ids": list(prompt),
                "sampling_params": {**params, "max_new_tokens": new},
            }
            if stream:
                return self._streamed(body, timeout_s)
            return _to_reply(self._send(body, timeout_s))

        with ThreadPoolExecutor(max(1, min(parallel, len(prompts)))) as pool:
            return list(pool.map(one, prompts, max_new_tokens))

    def _streamed(self, body: dict[str, Any], timeout_s: float) -> Reply:
        if self._url is None:
            raise TypeError("a stream needs a router or a unified engine")
        body["sampling_params"]["stream_interval"] = 1
        reading, answer = Reading("generate"), {}
        for event in web.events(
            f"{self._url}/generate", {**body, "stream": True}, timeout_s
        ):
            reading.take(event)
            answer = event
        return replace(_to_reply(answer), steps=reading.steps)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        stream: bool = True,
        timeout_s: float = 120.0,
        **fields: Any,
    ) -> ChatReply:
        """`/v1/chat/completions`, greedy; with `stream` the pieces are kept too."""
        if self._url is None:
            raise TypeError("chat needs a router or a unified engine")
        url = f"{self._url}/v1/chat/completions"
        body = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
            **fields,
        }
        if not stream:
            choice = web.call(url, body, timeout_s)["choices"][0]
            return ChatReply((choice["message"]["content"],), choice["finish_reason"])
        return _collect_stream(web.events(url, body, timeout_s))


@dataclass(frozen=True)
class ChatReply:
    """A chat answer: its pieces in order of arrival and why it ended."""

    pieces: tuple[str, ...]
    finish_reason: str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _collect_stream(chunks: Any) -> ChatReply:
    pieces: list[str] = []
    finish = None
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            pieces.append(choice.get("delta", {}).get("content") or "")
            finish = choice.get("finish_reason") or finish
    return ChatReply(tuple(p for p in pieces if p), finish)


def _dual_post(
    prefill: Engine, decode: Engine, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    body = {
        **body,
        "bootstrap_host": prefill.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.getrandbits(62),
    }
    with ThreadPoolExecutor(2) as pool:
        legs = [
            pool.submit(web.call, f"{engine.url}/generate", body, timeout_s)
            for engine in (prefill, decode)
        ]
        # Decode first: its answer is the result, its error is the more telling one.
        answer: dict[str, Any] = legs[1].result()
        legs[0].result()
    return answer


def _to_reply(answer: dict[str, Any]) -> Reply:
    if "meta_info" not in answer or "output_ids" not in answer:
        raise web.HttpError("/generate", f"an unexpected answer: {answer!r:.400}", 200)
    return Reply(
        tuple(answer["output_ids"]), answer["meta_info"], answer.get("text", "")
    )
