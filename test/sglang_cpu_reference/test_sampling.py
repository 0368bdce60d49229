"""Single tokens drawn with a request's own numbers: sampler and draft."""

from __future__ import annotations

from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("sglang.srt")

from sampling_statistics import LEAST_P, VOCABULARY, p_value, tables  # noqa: E402

from sglang_cpu_reference import coins, sampling  # noqa: E402

DRAWS = 20_000
SEEDS = torch.arange(DRAWS)
POSITIONS = torch.arange(DRAWS) % 7


def test_draws_follow_the_weights():
    probs = tables(0)[0][0]
    tokens = sampling.draw_by_seed(probs.log().expand(DRAWS, -1), SEEDS, POSITIONS)
    assert p_value(tokens, probs.double()) > LEAST_P


def test_neighbouring_positions_and_seeds_are_independent():
    probs = tables(0)[0][0]
    rows = probs.log().expand(DRAWS, -1)
    zeros = torch.zeros(DRAWS, dtype=torch.long)
    for pair in (
        ((SEEDS, zeros), (SEEDS, zeros + 1)),
        ((zeros, SEEDS), (zeros + 1, SEEDS)),
    ):
        tokens = torch.cat([sampling.draw_by_seed(rows, *at) for at in pair], dim=1)
        both = (probs.double()[:, None] * probs.double()).flatten()
        assert p_value(tokens, both) > LEAST_P


def test_a_token_of_no_weight_is_never_drawn():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    tokens = sampling.draw(weights, torch.tensor([0.0, 0.5, 1.0]))
    assert tokens.tolist() == [1, 3, 3]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 0.0])
def test_weights_that_allow_no_token_still_give_one(weight):
    """A request whose own fields forbid every token must not end its engine."""
    weights = torch.full((2, VOCABULARY), weight)
    tokens = sampling.draw(weights, torch.tensor([0.0, 0.9]))
    assert all(0 <= token < VOCABULARY for token in tokens.tolist())
    forbidden = sampling.draw_by_seed(weights.log(), SEEDS[:2], POSITIONS[:2])
    assert all(0 <= token < VOCABULARY for token in forbidden.flatten().tolist())


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_every_seed_that_sglang_takes_is_one(seed):
    first, again = (coins.stream(seed, 5, coins.Purpose.VERIFY).random(4) for _ in "ab")
    assert (first == again).all()
    other = coins.stream(seed, 5, coins.Purpose.SAMPLE).random(4)
    assert (first != other).all()


@pytest.fixture
def sampler(monkeypatch):
    """SGLang's sampler of top-k, top-p and min-p as the platform adapts it."""
    import sglang.srt.layers.sampler as module

    monkeypatch.setattr(module, "multinomial_with_seed", sampling.draw_by_seed)
    original = module.top_k_top_p_min_p_sampling_from_probs_torch
    return partial(sampling.draw_among_kept, original)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1 << 30, 1.0, 0.2), (5, 1.0, 0.0), (1 << 30, 0.7, 0.0), (6, 0.95, 0.1)],
)
def test_the_first_token_follows_top_k_top_p_and_min_p(sampler, top_k, top_p, min_p):
    probs = tables(1)[0][0]
    rows = probs.repeat(DRAWS, 1)
    tokens = sampler(
        rows,
        torch.full((DRAWS,), top_k),
        torch.full((DRAWS,), top_p),
        torch.full((DRAWS,), min_p),
        min_p > 0,
        SEEDS,
        POSITIONS,
    )
    values, order = probs.sort(descending=True)
    before = values.cumsum(0) - values
    kept = (torch.arange(VOCABULARY) < top_k) & (before <= top_p)
    kept &= values >= min_p * values[0]
    expected = torch.zeros(VOCABULARY).scatter(0, order, values * kept).double()
    assert 1 < kept.sum() < VOCABULARY
    p = p_value(tokens.long().unsqueeze(-1), expected / expected.sum())
    assert p > LEAST_P


def test_a_row_without_these_fields_draws_the_same_beside_one_that_has_them(sampler):
    """One such row sends the whole batch to this sampler, and it must not matter."""
    rows = tables(1)[0][0].repeat(64, 1)
    alone = sampling.draw_by_seed(rows.log(), SEEDS[:64], POSITIONS[:64])
    beside = sampler(
        rows,
        torch.full((64,), 1 << 30),
        torch.ones(64),
        torch.zeros(64),
        True,
        SEEDS[:64],
        POSITIONS[:64],
    )
    assert beside.tolist() == alone.view(-1).tolist()


def test_filtered_weights_are_given_with_the_token_that_was_drawn(sampler):
    if "return_filtered_probs" not in signature(sampler.args[0]).parameters:
        pytest.skip("this release does not give them")
    rows = tables(1)[0][0].repeat(64, 1)
    fields = (torch.full((64,), 3), torch.ones(64), torch.zeros(64), False)
    where = (SEEDS[:64], POSITIONS[:64])
    plain = sampler(rows.clone(), *fields, *where)
    tokens, weights, order, weight = sampler(
        rows.clone(), *fields, *where, return_filtered_probs=True
    )
    assert tokens.tolist() == plain.tolist()
    assert (weights > 0).sum(dim=-1).tolist() == [3] * 64
    assert (
        weight.tolist() == rows.gather(1, tokens.long().view(-1, 1)).flatten().tolist()
    )
    assert (
        order.gather(1, weights.argmax(-1, keepdim=True)) == rows.argmax(-1)[0]
    ).all()


def draft_once(rows, seeds, *, temperature=0.7, logits=None):
    from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep

    kept = torch.empty(rows, VOCABULARY)
    step = coins.StepCoins(tuple(seeds), (4,) * rows)
    with coins.during_step(step):
        tokens = sampling.draft_step(
            MarkovSampleStep.execute.__func__,
            MarkovSampleStep,
            base_logits=logits[:rows],
            bias=torch.zeros(rows, VOCABULARY),
            temperatures=torch.full((rows,), temperature),
            key=1,
            offset=torch.zeros(1, dtype=torch.int64),
            step=2,
            step_dtype=torch.float32,
            logits_out=kept,
        )
    return tokens, kept


def test_drafted_tokens_follow_the_draft():
    rows = 4000
    logits = tables(2)[1].log()[:1].repeat(rows, 1)
    tokens, kept = draft_once(rows, range(rows), logits=logits)
    expected = (logits[0].double() / 0.7).softmax(dim=-1)
    assert p_value(tokens.unsqueeze(-1), expected) > LEAST_P
    torch.testing.assert_close(kept, logits)


def test_a_row_drafts_the_same_alone_and_in_a_batch():
    logits = tables(3)[1].log()
    together, _ = draft_once(6, range(6), logits=logits)
    alone = [draft_once(1, [row], logits=logits[row:])[0].item() for row in range(6)]
    assert together.tolist() == alone


def test_a_greedy_row_of_a_sampling_batch_drafts_its_best_token():
    logits = tables(3)[1].log()
    tokens, _ = draft_once(6, range(6), temperature=0.0, logits=logits)
    assert tokens.tolist() == logits[:6].argmax(dim=-1).tolist()


def request(seed):
    return SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed))


def seeds_of(*asked, given=None):
    info = SimpleNamespace(sampling_seed=given)
    batch = SimpleNamespace(reqs=[request(seed) for seed in asked])
    return coins.seed_every_request(info, None, batch, VOCABULARY).sampling_seed


def test_every_request_of_a_batch_has_a_seed():
    assert seeds_of(5, -2).tolist() == [5, -2]
    drawn = seeds_of(*[None] * 50).tolist()
    assert len(set(drawn)) == 50
    assert seeds_of(None) != seeds_of(None)


def test_seeds_of_deterministic_inference_stay():
    assert seeds_of(5, None, given=torch.tensor([5, 42])).tolist() == [5, 42]


def test_a_step_without_a_sampling_request_has_no_numbers():
    greedy = SimpleNamespace(
        sampling_info=SimpleNamespace(is_all_greedy=True),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )
    seen = coins.decode_with_coins(lambda *_: coins.current_step(), None, greedy)
    assert seen is None


def test_a_step_knows_seeds_and_positions_until_it_ends():
    batch = SimpleNamespace(
        sampling_info=SimpleNamespace(
            is_all_greedy=False, sampling_seed=torch.tensor([3, 4])
        ),
        seq_lens=torch.tensor([10, 20]),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )
    seen = coins.decode_with_coins(lambda *_: coins.current_step(), None, batch)
    assert seen == coins.StepCoins((3, 4), (10, 20))
    assert coins.current_step() is None
