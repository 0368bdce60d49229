"""Tokens of a verified draft follow the target, and a request's own numbers decide.

Each statistical test draws the draft's tokens from the draft's distribution, verifies
them and compares the tokens that come out with the target's joint distribution. The
rules that are wrong on purpose show that the comparison can fail.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("sglang.srt")

from sampling_statistics import (  # noqa: E402
    CAUGHT_P,
    LEAST_P,
    VOCABULARY,
    filtered,
    joint,
    p_value,
    tables,
)

from sglang_cpu_reference import coins, verify_sampling  # noqa: E402

GAMMA, DRAWS = 3, 20_000


def draft_tokens(draft, numbers):
    """``[DRAWS, GAMMA + 1]``: token 0, then tokens from the draft."""
    tokens = [torch.zeros(DRAWS, dtype=torch.long)]
    for _ in range(GAMMA):
        drawn = torch.multinomial(draft[tokens[-1]], 1, generator=numbers)
        tokens.append(drawn.squeeze(-1))
    return torch.stack(tokens, dim=1)


def verify(candidates, target_probs, draft_probs, numbers, **how):
    """One chain as DSPARK calls it: tokens kept, the token after each slot, slots."""
    rows, slots = candidates.shape
    predicts = torch.full((rows * slots,), -7, dtype=torch.int32)
    accept_index = torch.full((rows, slots), -7, dtype=torch.int32)
    kept = torch.empty(rows, dtype=torch.int32)
    verify_sampling.chain_speculative_sampling(
        predicts,
        accept_index,
        kept,
        candidates,
        torch.arange(rows * slots).view(rows, slots),
        None,
        None,
        torch.rand(rows, slots - 1, generator=numbers),
        torch.rand(rows, generator=numbers),
        target_probs,
        draft_probs,
        1.0,
        1.0,
        True,
        **how,
    )
    return kept.long(), predicts.view(rows, slots).long(), accept_index


def completed(tokens, kept, target, numbers):
    """Tokens up to the bonus, then the target's own, so that all rows are as long."""
    for place in range(1, tokens.shape[1]):
        own = torch.multinomial(target[tokens[:, place - 1]], 1, generator=numbers)
        tokens[:, place] = torch.where(place <= kept, tokens[:, place], own.squeeze(-1))
    return tokens


def run_chain(seed, **how):
    """``[DRAWS, GAMMA + 1]`` tokens, how many were kept, and the target."""
    target, draft = tables(seed)
    numbers = torch.Generator().manual_seed(100 + seed)
    candidates = draft_tokens(draft, numbers)
    kept, tokens, _ = verify(
        candidates, target[candidates], draft[candidates[:, :-1]], numbers, **how
    )
    return completed(tokens, kept, target, numbers), kept, target


@pytest.mark.parametrize("blockwise", [False, True], ids=["tokens", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_follow_the_target(seed, blockwise):
    tokens, kept, target = run_chain(seed, block_verification=blockwise)
    p = p_value(tokens[:, :3], joint(target, 3))
    print(f"p = {p:.3f}, {kept.double().mean():.2f} of {GAMMA} kept")
    assert p > LEAST_P
    assert len(kept.unique()) == GAMMA + 1


def take_all(target, draft, tokens, uniform):
    return torch.full((len(tokens),), tokens.shape[1]), torch.ones(len(tokens))


def by_the_target_alone(target, draft, tokens, uniform):
    return RIGHT(target, torch.ones_like(draft), tokens, uniform)


def a_tenth_too_willing(target, draft, tokens, uniform):
    return RIGHT(target, draft, tokens, uniform * 0.9)


def past_a_refusal(target, draft, tokens, uniform):
    kept, scale = RIGHT(target, draft, tokens, uniform)
    return (kept + 1).clamp(max=tokens.shape[1]), scale


RIGHT = verify_sampling.accept_each


@pytest.mark.parametrize(
    "rule", [take_all, by_the_target_alone, a_tenth_too_willing, past_a_refusal]
)
def test_a_wrong_rule_of_acceptance_is_caught(rule, monkeypatch):
    monkeypatch.setattr(verify_sampling, "accept_each", rule)
    tokens, _, target = run_chain(0)
    p = p_value(tokens[:, :3], joint(target, 3))
    print(f"p = {p:.1e}")
    assert p < CAUGHT_P


def test_a_bonus_from_the_target_after_a_refusal_is_caught(monkeypatch):
    def whole(target, draft, kept, scale):
        return target[torch.arange(len(kept)), kept]

    monkeypatch.setattr(verify_sampling, "leftover", whole)
    tokens, _, target = run_chain(0)
    assert p_value(tokens[:, :3], joint(target, 3)) < CAUGHT_P


def test_the_first_token_is_kept_as_often_as_the_distributions_overlap():
    _, kept, target = run_chain(1)
    overlap = torch.minimum(target[0], tables(1)[1][0]).sum()
    assert (kept > 0).double().mean() == pytest.approx(float(overlap), abs=0.01)


def test_a_block_keeps_more_than_single_tokens():
    single, block = (run_chain(2, block_verification=b)[1] for b in (False, True))
    assert block.double().mean() > single.double().mean()


def sampling_info(rows, *, top_k=None, top_p=None):
    return SimpleNamespace(
        temperatures=torch.full((rows, 1), 0.8),
        top_ks=torch.full((rows,), top_k or 1 << 30, dtype=torch.int32),
        top_ps=torch.full((rows,), top_p or 1.0),
        need_top_k_sampling=top_k is not None,
        need_top_p_sampling=top_p is not None,
    )


@pytest.fixture
def dspark_accept(monkeypatch):
    """DSPARK's own accept step, with the chain that the platform gives it."""
    import sglang.kernels.ops.speculative.dspark.dspark_accept as module

    chain = verify_sampling.chain_speculative_sampling
    monkeypatch.setattr(module, "chain_speculative_sampling_triton", chain)
    return module.AcceptSampling.execute


def accept(execute, candidates, target_logits, draft_probs, info, top_k=None):
    rows, slots = candidates.shape
    return execute(
        candidates=candidates,
        target_logits=target_logits.reshape(rows * slots, -1),
        draft_probs=draft_probs,
        sampling_info=info,
        draft_input=SimpleNamespace(
            max_top_k=top_k or VOCABULARY, uniform_top_k_value=top_k
        ),
        gamma=slots - 1,
        verify_num_draft_tokens=slots,
    )


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (3, None), (None, 0.7), (5, 0.8)]
)
def test_dspark_accepts_by_temperature_top_k_and_top_p(dspark_accept, top_k, top_p):
    torch.manual_seed(3)
    logits, draft = tables(6)[0].log(), tables(6)[1]
    tempered = (logits / 0.8).softmax(dim=-1)
    target = torch.stack(
        [filtered(row.tolist(), top_k or VOCABULARY, top_p or 1.0) for row in tempered]
    )
    candidates = draft_tokens(draft, torch.Generator().manual_seed(3))
    kept, bonus, _ = accept(
        dspark_accept,
        candidates,
        logits[candidates],
        draft[candidates[:, :-1]],
        sampling_info(DRAWS, top_k=top_k, top_p=top_p),
        top_k,
    )
    kept = kept.long()
    after = candidates.roll(-1, dims=1).scatter(1, kept[:, None], bonus[:, None])
    tokens = completed(after, kept, target, torch.Generator().manual_seed(4))
    p = p_value(tokens[:, :3], joint(target, 3))
    print(f"p = {p:.3f}, {kept.double().mean():.2f} of {GAMMA} kept")
    assert p > LEAST_P


def test_a_request_gets_the_same_tokens_in_any_batch(dspark_accept):
    rows = 6
    numbers = torch.Generator().manual_seed(8)
    logits = torch.randn(rows, GAMMA + 1, VOCABULARY, generator=numbers)
    draft = torch.rand(rows, GAMMA, VOCABULARY, generator=numbers)
    draft /= draft.sum(dim=-1, keepdim=True)
    candidates = torch.randint(VOCABULARY, (rows, GAMMA + 1), generator=numbers)

    def outcome(order):
        step = coins.StepCoins(
            tuple(10 + row for row in order), tuple(row * 3 for row in order)
        )
        with coins.during_step(step):
            kept, bonus, _ = accept(
                dspark_accept,
                candidates[order],
                logits[order],
                draft[order],
                sampling_info(len(order)),
            )
        return {
            row: (int(k), int(b)) for row, k, b in zip(order, kept, bonus, strict=True)
        }

    together = outcome(list(range(rows)))
    assert outcome(list(range(rows))[::-1]) == together
    assert {row: outcome([row])[row] for row in range(rows)} == together


def test_only_the_kept_slots_are_written():
    one_hot = torch.eye(VOCABULARY)
    candidates = torch.tensor([[0, 1, 2, 3], [0, 1, 5, 3], [0, 4, 2, 3]])
    target = one_hot[torch.tensor([1, 2, 3, 6])].expand(3, -1, -1)
    numbers = torch.Generator().manual_seed(0)
    kept, after, index = verify(candidates, target, one_hot[candidates[:, 1:]], numbers)
    assert kept.tolist() == [3, 1, 0]
    assert after.tolist() == [[1, 2, 3, 6], [1, 2, -7, -7], [1, -7, -7, -7]]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, -7, -7], [8, -7, -7, -7]]


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1.0])
def test_a_token_without_a_draft_probability_is_refused(junk):
    target = torch.full((1, 2, VOCABULARY), 1 / VOCABULARY)
    draft = torch.full((1, 1, VOCABULARY), junk)
    numbers = torch.Generator().manual_seed(0)
    kept, after, _ = verify(torch.tensor([[0, 1]]), target, draft, numbers)
    assert kept.item() == 0
    assert 0 <= after[0, 0] < VOCABULARY
