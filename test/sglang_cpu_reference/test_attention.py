from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from naive_attention import naive_attention  # noqa: E402

from sglang_cpu_reference.attention import attend, visible_keys  # noqa: E402


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 0, 3, 100])
@pytest.mark.parametrize(("rows", "total"), [(1, 1), (1, 9), (4, 4), (4, 11), (11, 11)])
def test_attend_follows_the_definition(causal, window_left, rows, total):
    generator = torch.Generator().manual_seed(rows * 100 + total)
    query = torch.randn(rows, 4, 8, generator=generator)
    key = torch.randn(total, 2, 8, generator=generator)
    value = torch.randn(total, 2, 8, generator=generator)
    mask = visible_keys(rows, total, causal=causal, window_left=window_left)
    got = attend(query, key, value, scale=0.3, mask=mask)
    want = naive_attention(
        query, key, value, scale=0.3, causal=causal, window_left=window_left
    )
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_block_positions_see_each_other_unless_causal():
    assert visible_keys(3, 5, causal=False, window_left=-1) is None
    mask = visible_keys(3, 5, causal=True, window_left=-1)
    assert mask.tolist()[0] == [True, True, True, False, False]


def test_window_bounds_the_past_and_leaves_the_block_open():
    mask = visible_keys(2, 6, causal=False, window_left=1)
    assert mask.tolist() == [
        [False, False, False, True, True, True],
        [False, False, False, False, True, True],
    ]
