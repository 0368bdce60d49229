"""Request bodies that no client should send, and what a server makes of each.

`BODIES` are the fields that differ from a good request, by name.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dspark_pd.bed import Engine, Server
from dspark_pd.bed.leftovers import empty_within

PROMPT = [65, 66, 67, 68, 69, 70, 71, 72]
NEW_TOKENS = 4
HUGE = 2**70


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": fields}


def _of(name: str, field: str, *values: Any) -> dict[str, dict[str, Any]]:
    """The same field with several values."""
    return {f"{name} {field}={value!r:.40}": {field: value} for value in values}


def _sampled(field: str, *values: Any) -> dict[str, dict[str, Any]]:
    """The same sampling parameter with several values."""
    return {f"{field}={value!r:.40}": sampling(**{field: value}) for value in values}


_STRANGE = (-1, "x", [], HUGE)
PROMPTS: Mapping[str, dict[str, Any]] = {
    **_of("prompt", "input_ids", [], [[]], [[65], []], [65, -1], [65, 10**6]),
    **_of("prompt", "input_ids", [2**31], [2**63], [HUGE], [1.5], ["a"], [None]),
    **_of("prompt", "input_ids", "abc", 5, {"a": 1}, [[65], ["a"]], [[65], 66], [True]),
    **_of("prompt", "input_ids", [[[65]]], None),
    **{
        f"prompt text={text!r:.40}": {"input_ids": None, "text": text}
        for text in ("", [""], ["a", ""], 5, [5], {}, [], "\x00", "\ud7ff", "é" * 3)
    },
    "prompt both": {"text": "a"},
    "prompt beyond the context": {"input_ids": [65] * 100_000},
    "prompt beyond the pool": {"input_ids": [65] * 17_000},
    "prompt of embeddings": {"input_ids": None, "input_embeds": [[0.5] * 64]},
    "prompt of an image": {"image_data": "none"},
    "a batch": {"input_ids": [PROMPT] * 3},
    "a batch with a foreign id": {"input_ids": [PROMPT, [10**6], PROMPT]},
}
SAMPLED: Mapping[str, dict[str, Any]] = {
    **_sampled("n", -1, 0, 1.5, "2", None, [2], 2, 3),
    **_sampled("max_new_tokens", *_STRANGE, 10**9),
    **_sampled("min_new_tokens", *_STRANGE),
    **_sampled("temperature", *_STRANGE, float("nan"), float("inf"), -1.0),
    **_sampled("top_p", *_STRANGE, float("nan")),
    **_sampled("top_k", *_STRANGE),
    **_sampled("min_p", *_STRANGE, float("nan")),
    **_sampled("frequency_penalty", *_STRANGE, float("nan")),
    **_sampled("repetition_penalty", *_STRANGE, float("nan")),
    **_sampled("sampling_seed", *_STRANGE, 2**63),
    **_sampled("stop", *_STRANGE, [5], "", [""]),
    **_sampled("stop_token_ids", *_STRANGE, [-1], [HUGE], ["a"], [10**6]),
    **_sampled("stop_regex", *_STRANGE, "(", ["("]),
    **_sampled("regex", *_STRANGE, "(", "(a+)+$", ""),
    **_sampled("json_schema", *_STRANGE, "{", "{}", '{"$ref": "#"}'),
    **_sampled("ebnf", *_STRANGE, "root ::=", ""),
    **_sampled("structural_tag", *_STRANGE, "{}"),
    **_sampled("logit_bias", *_STRANGE, {"-1": 1.0}, {"a": 1}, {"65": "x"}),
    **_sampled("logit_bias", {"65": float("nan")}, {"65": HUGE}, {"300": 1.0}),
    **_sampled("ignore_eos", *_STRANGE),
    **_sampled("custom_params", *_STRANGE),
    **_sampled("beam_width", 2, -1, "x"),
    **_sampled("no_such_field", 1),
    **_of("", "sampling_params", [], "x", 5, None, [{}], [{}, {}], [None]),
}
FIELDS: Mapping[str, dict[str, Any]] = {
    **{
        f"return_logprob with {field}={value!r:.40}": {
            "return_logprob": True,
            field: value,
        }
        for field, values in {
            "logprob_start_len": (-5, 0, 8, 9, 10**9, HUGE, "x", None, [0]),
            "top_logprobs_num": (-1, 0, 2, 128, 129, 300, 10**6, HUGE, "x", 1.5, None),
            "token_ids_logprob": ([-1], [10**6], ["a"], [65], 5, "x", [[65]], []),
        }.items()
        for value in values
    },
    **_of("", "return_logprob", "x", [], 5, None),
    **_of("", "rid", "", "x", 5, [], ["a", "b"], {}),
    **_of("", "stream", "x", 5, None),
    **_of("", "session_params", {"id": "none"}, {}, "x", {"id": 5}, []),
    **_of("", "session_id", "none", 5, ""),
    **_of("", "lora_path", "none", 5, []),
    **_of("", "priority", 5, "x", HUGE),
    **_of("", "routed_dp_rank", 5, -1, "x"),
    **_of("", "disagg_prefill_dp_rank", 5, -1, "x"),
    **_of("", "extra_key", 5, "x", []),
    **_of("", "cache_salt", 5, "x", []),
    **_of("", "kv_hints", 5, "x", {}, []),
    **_of("", "custom_logit_processor", 5, "x", {}),
    **_of("", "return_hidden_states", True, "x", "last"),
    **_of("", "return_routed_experts", True, "x"),
    **_of("", "return_indexer_topk", True, "x"),
    **_of("", "return_sampling_mask", True, "x"),
    **_of("", "return_prompt_token_ids", True, "x"),
    **_of("", "return_text_in_logprobs", True, "x"),
    **_of("", "positional_embed_overrides", {}, "x"),
    **_of("", "multi_item_delimiter_indices", [1], "x", [-1]),
    **_of("", "require_reasoning", True, "x"),
    **_of("", "watermark", True, "x", {}),
    **_of("", "background", True, "x"),
    **_of("", "no_such_field", 1),
}
BODIES: Mapping[str, dict[str, Any]] = {**PROMPTS, **SAMPLED, **FIELDS}
# Those that ended an engine, or left its clients without an answer.
REFUSED_BODIES = (
    "prompt text=''",
    "prompt input_ids=[[]]",
    "prompt input_ids=[65, -1]",
    "prompt input_ids=[65, 1000000]",
    "return_logprob with logprob_start_len=-5",
    "return_logprob with top_logprobs_num=-1",
    "return_logprob with top_logprobs_num=300",
    " positional_embed_overrides={}",
)


def body_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A small good request with these fields in place of its own."""
    good = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": good, **fields}
    if isinstance(fields.get("sampling_params"), dict):
        body["sampling_params"] = {**good, **fields["sampling_params"]}
    return {k: v for k, v in body.items() if v is not None or k not in ("input_ids",)}


def post(server: Server, body: Any, limit_s: float) -> int | None:
    """Status of the answer; None when the client left before there was one."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=limit_s)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def with_room(prefill: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """What a router adds; a batch gets a room for each prompt."""
    prompts = body.get("input_ids") or body.get("text")
    is_batch = isinstance(prompts, list) and any(
        isinstance(prompt, list | str) for prompt in prompts
    )
    count = len(prompts) if is_batch else 1
    rooms = [random.getrandbits(62) for _ in range(count)]
    added = {
        "bootstrap_host": [prefill.host] * count,
        "bootstrap_port": [prefill.bootstrap_port] * count,
        "bootstrap_room": rooms,
    }
    return {**(added if is_batch else {k: v[0] for k, v in added.items()}), **body}


def send_all(
    engines: Sequence[Engine], bodies: Mapping[str, dict[str, Any]], limit_s: float
) -> dict[str, list[int | None]]:
    """What the engines said to each body, eight bodies at a time.

    Args:
        engines: one that does both, or prefill and decode, which get a body together.
    """

    def send(fields: dict[str, Any]) -> list[int | None]:
        body = body_of(fields)
        if len(engines) > 1:
            body = with_room(engines[0], body)
        with ThreadPoolExecutor(len(engines)) as legs:
            return list(legs.map(lambda engine: post(engine, body, limit_s), engines))

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(bodies, pool.map(send, bodies.values()), strict=True))


def assert_alive_and_empty(
    *engines: Engine, said: Mapping[str, list[int | None]] | None = None
) -> None:
    """The engines answer their health check and hold no request and no KV token."""
    silent = [name for name, answers in (said or {}).items() if None in answers]
    for engine in engines:
        assert engine.alive(), f"{engine.name} has ended; no answer to {silent}"
        held = empty_within(engine)
        assert held == {}, f"{engine.name} holds {held}; no answer to {silent}"
        assert engine.healthy(), f"{engine.name} is not healthy"
