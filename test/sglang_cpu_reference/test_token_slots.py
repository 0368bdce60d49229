from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sglang_cpu_reference.token_slots import (  # noqa: E402
    assign_req_to_token_pool,
    last_slots,
    speculative_cache_locs,
)


def test_slots_land_at_each_requests_positions():
    table = torch.zeros(3, 8, dtype=torch.int32)
    assign_req_to_token_pool(
        torch.tensor([2, 0]),
        table,
        torch.tensor([1, 4]),
        torch.tensor([4, 6]),
        torch.tensor([11, 12, 13, 21, 22]),
        2,
    )
    assert table[2].tolist() == [0, 11, 12, 13, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 0, 21, 22, 0, 0]
    assert not table[1].any()


def test_a_wrong_number_of_slots_is_refused():
    with pytest.raises(ValueError, match="3 positions to fill but 2"):
        assign_req_to_token_pool(
            torch.tensor([0]),
            torch.zeros(1, 8, dtype=torch.int32),
            torch.tensor([0]),
            torch.tensor([3]),
            torch.tensor([1, 2]),
            1,
        )


def test_draft_window_slots_come_request_after_request():
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    locs = speculative_cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([1, 3]),
        end_offset=torch.tensor([4, 6]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert locs.dtype == torch.int64
    assert locs.tolist() == [17, 18, 19, 3, 4, 5]


def test_last_slot_of_each_prefix_and_none_for_an_empty_one():
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    got = last_slots(table, torch.tensor([2, 0, 1]), torch.tensor([3, 0, 1]))
    assert got.dtype == torch.int64
    assert got.tolist() == [18, -1, 8]
