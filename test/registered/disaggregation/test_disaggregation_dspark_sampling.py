"""Sampling with DSPARK: what is drawn, by whose seed, and which fields are served.

A request with a seed gets the same tokens from unified serving and from a pair, alone
and in a batch: on the CPU reference platform every random number belongs to a request
and a position. That the numbers decide rightly is measured against probabilities that
the target itself gives, without speculation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import exp
from typing import Any

import pytest
from pd_fuzz import (
    BODIES,
    REFUSED_BODIES,
    assert_alive_and_empty,
    body_of,
    post,
    sampling,
    send_all,
    with_room,
)
from pd_parity import Pair, accept_length, assert_both_paths_ran, verify_vector
from scipy import stats

from dspark_pd.bed import MODELS, Bed, Client, Engine, EngineSpec, HttpError, Reply, web

pytestmark = pytest.mark.e2e

#: The tiny target copies keys; after text without one it is of two minds.
UNSURE = tuple(b"Hello, how are you?")
COPYING = tuple(b"q7Rk2mXw9TzB|q7Rk2mXw9TzB|q7Rk")
SEEDS = range(12)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def unified(bed: Bed) -> Iterator[Engine]:
    spec = EngineSpec("sampling-u", "unified", MODELS.target, MODELS.draft_full)
    (engine,) = bed.start([spec])
    yield engine
    bed.stop(engine)


def by_seed(client: Client, parallel: int = 8, **sampling: Any) -> list[Reply]:
    """Replies to both prompts for each seed."""
    return [
        reply
        for seed in SEEDS
        for reply in client.generate(
            [UNSURE, COPYING],
            NEW_TOKENS,
            parallel=parallel,
            **{"temperature": 1.0, "sampling_seed": seed, **sampling},
        )
    ]


def outcome(replies: list[Reply]) -> list[tuple[tuple[int, ...], int]]:
    return [(reply.output_ids, reply.verify_steps) for reply in replies]


def test_a_pair_draws_what_unified_draws(native_pair: Pair, unified: Engine) -> None:
    before = native_pair.prefill.bytes_posted()
    alone = by_seed(Client.unified(unified))
    pair = by_seed(native_pair.client)
    assert len({reply.output_ids for reply in alone}) > len(SEEDS) / 2
    assert outcome(pair) == outcome(alone)
    assert all(verify_vector(pair)), "speculation was off"
    assert_both_paths_ran(pair)
    assert accept_length(pair) / accept_length(alone) == 1.0
    assert native_pair.prefill.bytes_posted() > before
    assert native_pair.decode.bytes_posted() == 0


def test_a_seed_gives_the_same_tokens_again_and_in_any_batch(
    native_pair: Pair,
) -> None:
    prompts = [UNSURE] * 8 + [COPYING] * 8
    batched = native_pair.client.generate(
        prompts, NEW_TOKENS, parallel=16, temperature=0.8, sampling_seed=5
    )
    single = native_pair.client.generate(
        [UNSURE, COPYING], NEW_TOKENS, parallel=1, temperature=0.8, sampling_seed=5
    )
    assert set(outcome(batched)) == set(outcome(single))


def test_a_seed_gives_the_same_tokens_beside_other_fields(unified: Engine) -> None:
    """The requests of one body are prefilled together; the router takes no such body."""

    def drawn(*mates: dict[str, Any]) -> list[list[int]]:
        how = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        seeded = [{**how, "sampling_seed": seed} for seed in SEEDS]
        fields = [*seeded, *({**how, **mate} for mate in mates)]
        body = {"input_ids": [UNSURE] * len(fields), "sampling_params": fields}
        answers = web.call(f"{unified.url}/generate", body)
        return [answer["output_ids"] for answer in answers][: len(seeded)]

    alone = drawn()
    for mate in ({"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.2}):
        assert drawn(mate) == alone, mate


def test_without_a_seed_tokens_differ(native_pair: Pair) -> None:
    replies = native_pair.client.generate([UNSURE] * 6, NEW_TOKENS, temperature=1.5)
    assert len({reply.output_ids for reply in replies}) > 1


TOP_K, TEMPERATURE, DEPTH, DRAWS = 4, 1.5, 3, 2000


def exact_probabilities(engine: Engine) -> dict[tuple[int, ...], float]:
    """Probability of each continuation, asked token by token without speculation."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        begun = list(known)
        body = {
            "input_ids": [[*UNSURE, *tokens] for tokens in begun],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": TOP_K,
        }
        following = {}
        answers = web.call(f"{engine.url}/generate", body)
        for tokens, answer in zip(begun, answers, strict=True):
            (best,) = answer["meta_info"]["output_top_logprobs"]
            weights = {token: exp(log / TEMPERATURE) for log, token, _ in best}
            for token, weight in weights.items():
                share = weight / sum(weights.values())
                following[(*tokens, token)] = known[tokens] * share
        known = following
    return known


def test_sampled_tokens_follow_the_target(unified: Engine) -> None:
    """Draws of three tokens: chi-square over the 64 continuations of top-k 4."""
    expected = exact_probabilities(unified)
    body = {
        "input_ids": list(UNSURE),
        "sampling_params": {
            "n": DRAWS,
            "temperature": TEMPERATURE,
            "top_k": TOP_K,
            "max_new_tokens": DEPTH,
            "ignore_eos": True,
        },
    }
    answers = web.call(f"{unified.url}/generate", body)
    drawn = [tuple(answer["output_ids"]) for answer in answers]
    assert len(drawn) == DRAWS
    assert set(drawn) <= set(expected)
    often = [tokens for tokens, p in expected.items() if p * DRAWS >= 5]
    counts = [drawn.count(tokens) for tokens in often]
    wanted = [expected[tokens] * DRAWS for tokens in often]
    counts.append(DRAWS - sum(counts))
    wanted.append(DRAWS - sum(wanted))
    statistic, p = stats.chisquare(counts, wanted)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    print(
        f"chi-square {statistic:.1f} over {len(counts)} cells, p = {p:.3f}; "
        f"{steps} verify steps for {DRAWS * (DEPTH - 1)} tokens"
    )
    assert len(often) >= 10
    assert p > 1e-4
    # Some drafts were accepted, some refused.
    assert DRAWS < steps < DRAWS * (DEPTH - 1)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
SERVED: Mapping[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "top_p, top_k and min_p": {"top_p": 0.9, "top_k": 5, "min_p": 0.1},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {"65": 4.0}},
    "min_new_tokens": {"min_new_tokens": 12},
    "ignore_eos": {"ignore_eos": False},
    "stop": {"stop": ["l"]},
    "stop_regex": {"stop_regex": ["[a-k]"]},
    "stop_token_ids": {"stop_token_ids": [111]},
    "regex": {"regex": "[0-9]{5}"},
    "json_schema": {"json_schema": SCHEMA},
    "ebnf": {"ebnf": 'root ::= "yes" | "no"'},
    "a low temperature": {"temperature": 1e-5},
    "a high temperature": {"temperature": 1e30},
    "a bias against every token": {
        "logit_bias": {str(token): -1e39 for token in range(260)}
    },
}


@pytest.mark.parametrize("name", SERVED)
def test_a_field_means_the_same_to_a_pair(
    native_pair: Pair, unified: Engine, name: str
) -> None:
    """Sent to the engines themselves: the router drops some fields of `/generate`."""
    how = {"temperature": 0.8, "sampling_seed": 3, **SERVED[name]}
    alone = Client.unified(unified).generate([UNSURE], 24, **how)
    pair = native_pair.direct.generate([UNSURE], 24, **how)
    assert outcome(pair) == outcome(alone)
    assert pair[0].meta["finish_reason"] == alone[0].meta["finish_reason"]


@pytest.mark.parametrize(
    ("name", "whole"),
    [("regex", r"\d{5}"), ("json_schema", r"\{.*\}"), ("ebnf", "yes|no")],
)
def test_a_grammar_binds_sampled_tokens(
    native_pair: Pair, name: str, whole: str
) -> None:
    (reply,) = native_pair.client.generate(
        [UNSURE], 200, temperature=0.8, sampling_seed=3, **SERVED[name]
    )
    assert re.fullmatch(whole, reply.text, re.DOTALL), reply.text


def test_logprobs_of_sampled_tokens(native_pair: Pair, unified: Engine) -> None:
    body = {
        "input_ids": list(UNSURE),
        "sampling_params": {
            "temperature": 0.8,
            "sampling_seed": 3,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    metas = [
        web.call(f"{server.url}/generate", body)["meta_info"]
        for server in (unified, native_pair.router)
    ]
    alone, pair = (meta["output_token_logprobs"] for meta in metas)
    assert [token for _, token, _ in pair] == [token for _, token, _ in alone]
    assert [p for p, _, _ in pair] == pytest.approx([p for p, _, _ in alone], abs=1e-4)
    assert all(p <= 0 for p, _, _ in pair)


REFUSED: Mapping[str, dict[str, Any]] = {
    "temperature below 0": {"temperature": -1},
    "top_p of 0": {"top_p": 0},
    "top_p above 1": {"top_p": 2},
    "top_k of 0": {"top_k": 0},
    "min_p above 1": {"min_p": 2},
    "frequency_penalty": {"frequency_penalty": 9},
    "presence_penalty": {"presence_penalty": -9},
    "repetition_penalty of 0": {"repetition_penalty": 0},
    "more tokens at least than at most": {"min_new_tokens": 99},
    "bias of no token": {"logit_bias": {"9999": 1.0}},
    "seed beyond 64 bits": {"sampling_seed": 2**70},
    "regex": {"regex": "["},
    "json_schema": {"json_schema": "{"},
    "ebnf": {"ebnf": "root ::="},
    "two grammars": {"regex": "a", "ebnf": 'root ::= "a"'},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_costs_its_own_request(unified: Engine, name: str) -> None:
    how = {"temperature": 0.8, **REFUSED[name]}
    with pytest.raises(HttpError) as refused:
        Client.unified(unified).generate([UNSURE], 8, **how)
    assert refused.value.status == 400
    assert unified.alive()


def test_the_first_chat_of_a_newcomer(native_pair: Pair, unified: Engine) -> None:
    """No temperature, no limit, no seed: what a chat client sends by itself."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello, how are you?"}],
    }
    answer = web.call(f"{native_pair.router.url}/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    seeded = {**body, "seed": 3, "max_tokens": NEW_TOKENS}
    texts = {
        web.call(f"{server.url}/v1/chat/completions", seeded)["choices"][0]["message"][
            "content"
        ]
        for server in (unified, native_pair.router)
    }
    assert len(texts) == 1


def test_samples_of_a_pair_are_those_of_unified(
    native_pair: Pair, unified: Engine
) -> None:
    body = {
        "input_ids": [list(COPYING), list(UNSURE)],
        "sampling_params": {
            "n": 3,
            "temperature": 0,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
        },
    }
    alone, pair = (
        [
            (answer["output_ids"], answer["meta_info"]["spec_verify_ct"])
            for answer in web.call(f"{server.url}/generate", body, timeout_s=20.0)
        ]
        for server in (unified, native_pair.router)
    )
    assert pair == alone
    assert len(pair) == 6
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": NEW_TOKENS,
        "n": 2,
    }
    answer = web.call(f"{native_pair.router.url}/v1/chat/completions", chat, 20.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


def test_clients_that_leave_samples_and_streams_cost_nothing(
    native_pair: Pair,
) -> None:
    """At every stage of a request, from before it is tokenized until it is decoded."""
    kinds = (sampling(n=2), sampling(n=4), {"stream": True}, {"input_ids": [65] * 700})
    bodies = [body_of(fields) for fields in kinds]
    for body in bodies:
        assert post(native_pair.router, body, 20.0) == 200
        body["sampling_params"]["max_new_tokens"] = 64
    for after_s in (0.001, 0.01, 0.03, 0.06, 0.12):
        with ThreadPoolExecutor(8) as pool:
            for body in bodies * 2:
                pool.submit(post, native_pair.router, body, after_s)
    assert_alive_and_empty(native_pair.prefill, native_pair.decode)


def test_no_body_ends_an_engine(native_pair: Pair, unified: Engine) -> None:
    pair = (native_pair.prefill, native_pair.decode)
    with ThreadPoolExecutor(2) as pool:
        sent = [
            pool.submit(send_all, engines, BODIES, limit_s=1.5)
            for engines in ([unified], pair)
        ]
    alone, together = (future.result() for future in sent)
    assert_alive_and_empty(unified, said=alone)
    assert_alive_and_empty(*pair, said=together)
    assert together["a batch"] == together["n=3"] == [200, 200]
    for name in REFUSED_BODIES:
        assert alone[name] == [400], name
        assert together[name] == [400, 400], name


def test_two_requests_of_one_room_do_not_end_decode(native_pair: Pair) -> None:
    engines = (native_pair.prefill, native_pair.decode)
    body = with_room(engines[0], body_of(sampling(max_new_tokens=64)))
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda e: post(e, body, 1.5), [*engines, *engines]))
    assert 400 in said
    assert_alive_and_empty(*engines)


def test_every_process_is_healthy_at_the_end(
    bed: Bed, native_pair: Pair, unified: Engine
) -> None:
    bed.assert_healthy()
    assert native_pair.router.alive()
