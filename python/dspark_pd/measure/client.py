"""Sends one request and learns from its stream what each verify step committed.

With a stream interval of 1 an engine sends one event for each verify step, and routers
pass them on one by one. The first event has the token that prefill made; step 1 is the
first verify step after the handoff. Events may be merged on the way (a slow client, a
server with a larger interval): the count of verify steps in the last event tells, and
the steps of such a request are not used.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from dspark_pd.measure import web
from dspark_pd.measure.prompts import Prompt

ENDPOINTS: Final = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
TIERS: Final = ("storage", "host", "device")


@dataclass(frozen=True)
class Served:
    """One request as its stream told it; partial where ``error`` is set.

    ``steps``: tokens that each verify step committed, the first after the handoff first;
    None where the stream did not tell. ``sized``: every event told how many tokens it
    had. ``verify_steps`` is the server's own count, else
    that of the events; None without speculation. Times in seconds from the sending.
    """

    prompt: int
    round: int
    prefill: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    verify_steps: int | None = None
    steps: tuple[int, ...] | None = None
    sized: bool = True
    cached: Mapping[str, int] = field(default_factory=dict)
    first_token_s: float | None = None
    seconds: float = 0.0
    text: str = ""
    error: str | None = None
    status: int | None = None

    @property
    def tier(self) -> str:
        """Where prefill had most of the prompt: ``cold`` means that it computed it.

        A few tokens are in a cache by chance, or by a shared template: they do not count
        up to half of the prompt. A tier is the slowest that gave any.
        """
        if 2 * sum(self.cached.values()) <= self.prompt_tokens:
            return "cold"
        return next((t for t in TIERS if self.cached.get(t)), "cached")


class Where(Protocol):
    """A place that requests are sent to."""

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...


@dataclass(frozen=True)
class Address:
    """A router, or a server that does everything; ``endpoint`` is one of ENDPOINTS."""

    url: str
    endpoint: str
    timeout_s: float
    key: str | None = None

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return web.events(
            self.url + ENDPOINTS[self.endpoint], body, self.timeout_s, self.key
        )


@dataclass(frozen=True)
class Engines:
    """One prefill and one decode engine, past the router: ``bootstrap_port`` is prefill's."""

    prefill: str
    bootstrap_port: int
    decode: Address

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        host = urlsplit(self.prefill).hostname
        room = random.getrandbits(62)
        body |= {
            "bootstrap_host": host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }
        ours = self.decode
        url = self.prefill + ENDPOINTS[ours.endpoint]
        refused: list[web.RequestFailed] = []

        def send() -> None:
            try:
                web.post(url, {**body, "stream": False}, ours.timeout_s, ours.key)
            except web.RequestFailed as error:
                refused.append(error)

        leg = threading.Thread(target=send, daemon=True)
        leg.start()
        try:
            yield from ours.stream(body)
        except web.RequestFailed as error:
            leg.join(1.0)
            raise (refused or [error])[0] from None


@dataclass(frozen=True)
class Client:
    """How requests look; ``model`` is what the OpenAI endpoints ask for.

    ``logprobs``: ask for them, because their number tells how many tokens an event has
    where a router drops the option that makes servers say so.
    """

    endpoint: str
    new_tokens: int
    temperature: float = 0.0
    model: str = "default"
    logprobs: bool = False

    def ask(self, where: Where, prompt: Prompt, index: int, number: int) -> Served:
        """Send one request and read all of its stream; an error is part of the result."""
        reading = Reading(self.endpoint)
        served = Served(index, number)
        try:
            try:
                for event in where.stream(self.body(prompt)):
                    reading.take(event)
            except web.RequestFailed as error:
                served = replace(served, error=str(error), status=error.status)
            return reading.into(served)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            text = f"an event of another form than SGLang's ({error})"
            return replace(served, error=text)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request of one prompt."""
        if self.endpoint == "generate":
            sampling = {
                "temperature": self.temperature,
                "max_new_tokens": self.new_tokens,
                "ignore_eos": True,
                "stream_interval": 1,
            }
            what: dict[str, Any] = {"text": _text(prompt)}
            if prompt.ids is not None:
                what = {"input_ids": list(prompt.ids)}
            return {**what, "stream": True, "sampling_params": sampling}
        common = {
            "model": self.model,
            "temperature": self.temperature,
            "max_tokens": self.new_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_cached_tokens_details": True,
            "return_spec_tokens_details": True,
        }
        if self.endpoint == "completions":
            return {
                **common,
                "prompt": _text(prompt),
                **({"logprobs": 1} if self.logprobs else {}),
            }
        messages = prompt.messages or ({"role": "user", "content": _text(prompt)},)
        extra = {"logprobs": True} if self.logprobs else {}
        return {**common, "messages": list(messages), **extra}


def _text(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return "\n".join(str(m.get("content") or "") for m in prompt.messages or ())


class Reading:
    """The state of one stream: totals of tokens, one for each event that had some."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.began = time.monotonic()
        self.totals: list[int] = []
        self.first: float | None = None
        self.last = self.began
        self.text = ""
        self.meta: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self.cut_by_length = False
        self.told = True
        """Whether every event so far said how many tokens it had."""

    def take(self, event: dict[str, Any]) -> None:
        self.last = time.monotonic()
        if self.endpoint == "generate":
            self._native(event)
        else:
            self._openai(event)
        if self.first is None and (self.totals or self.text):
            self.first = self.last

    def _native(self, event: dict[str, Any]) -> None:
        meta = event.get("meta_info") or {}
        self.meta |= meta
        total = meta.get("completion_tokens")
        self._count(total)
        ids = event.get("output_ids")
        # A server may send the whole text each time, or only what is new.
        new_only = isinstance(ids, list) and len(ids) != total
        text = event.get("text") or ""
        self.text = self.text + text if new_only else text
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise web.RequestFailed(f"the server gave up: {reason.get('message')}", 200)
        self.cut_by_length |= reason.get("type") == "length"

    def _openai(self, event: dict[str, Any]) -> None:
        extra = event.get("sglext") or {}
        self.meta |= extra.get("spec_tokens_details") or {}
        if extra.get("cached_tokens_details"):
            self.meta["cached_tokens_details"] = extra["cached_tokens_details"]
        usage = event.get("usage") or {}
        self.usage |= {k: v for k, v in usage.items() if v is not None}
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            text = text or delta.get("reasoning_content") or ""
            self.text += text
            count = _tokens_in(choice)
            if "completion_tokens" in usage:
                self._count(usage["completion_tokens"])
            elif count is not None:
                self._count((self.totals or [0])[-1] + count)
            elif text:
                self.told = False
                self._count((self.totals or [0])[-1] + 1)
            self.cut_by_length |= choice.get("finish_reason") == "length"

    def _count(self, total: Any) -> None:
        if isinstance(total, int) and total > (self.totals or [0])[-1]:
            self.totals.append(total)

    @property
    def verify_steps(self) -> int | None:
        """As the server counted them, else as events; None without speculation."""
        reported: int | None = self.meta.get("spec_verify_ct")
        sizes = self._sizes()
        if reported is None and any(tokens > 1 for tokens in sizes):
            return len(sizes)
        return reported

    @property
    def steps(self) -> tuple[int, ...] | None:
        """Tokens of each verify step; None where events were merged or have no count.

        The last step is left out where it was cut to the number of tokens asked for.
        """
        sizes = self._sizes()
        if not self.told or self.verify_steps not in (None, len(sizes)):
            return None
        return sizes[:-1] if self.cut_by_length else sizes

    def _sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in itertools.pairwise(self.totals))

    def into(self, served: Served) -> Served:
        """``served`` with everything that the stream told."""
        totals = self.totals
        told = self.usage.get("completion_tokens", totals[-1] if totals else 0)
        return replace(
            served,
            prompt_tokens=self._prompt_tokens(),
            completion_tokens=told,
            verify_steps=self.verify_steps,
            steps=self.steps,
            sized=self.told,
            cached=self._cached(),
            first_token_s=None if self.first is None else self.first - self.began,
            seconds=self.last - self.began,
            text=self.text,
        )

    def _prompt_tokens(self) -> int:
        found = self.meta.get("prompt_tokens", self.usage.get("prompt_tokens"))
        return int(found or 0)

    def _cached(self) -> dict[str, int]:
        details = self.meta.get("cached_tokens_details") or {}
        tiers = {t: int(details[t]) for t in TIERS if details.get(t)}
        inner = self.usage.get("prompt_tokens_details") or {}
        plain = self.meta.get("cached_tokens") or inner.get("cached_tokens")
        return tiers or ({"cached": int(plain)} if plain else {})


def _tokens_in(choice: Mapping[str, Any]) -> int | None:
    """How many tokens an OpenAI event has, where something in it tells."""
    if isinstance(choice.get("token_ids"), list):
        return len(choice["token_ids"])
    logprobs = choice.get("logprobs") or {}
    listed = logprobs.get("content", logprobs.get("tokens"))
    return len(listed) if isinstance(listed, list) else None
