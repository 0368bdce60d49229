from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt")

from sglang_cpu_reference.kv_pool import ReferenceMHATokenToKVPool  # noqa: E402

LAYERS = 3


@pytest.fixture
def pool():
    made = ReferenceMHATokenToKVPool(
        size=32,
        page_size=4,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,
    )
    for number, buffer in enumerate((*made.k_buffer, *made.v_buffer)):
        rows = torch.arange(buffer.shape[0], dtype=torch.float32)
        buffer[:] = (rows + 100 * number).view(-1, 1, 1)
    return made


def first_column(pool):
    return [b[:, 0, 0].tolist() for b in (*pool.k_buffer, *pool.v_buffer)]


def test_move_copies_rows_of_every_layer(pool):
    before = first_column(pool)
    pool.move_kv_cache(torch.tensor([20, 5]), torch.tensor([3, 9]))
    for old, new in zip(before, first_column(pool), strict=True):
        expected = list(old)
        expected[20], expected[5] = old[3], old[9]
        assert new == expected


def test_move_between_overlapping_slots_reads_before_it_writes(pool):
    before = first_column(pool)
    pool.move_kv_cache(torch.tensor([4, 5, 6]), torch.tensor([3, 4, 5]))
    for old, new in zip(before, first_column(pool), strict=True):
        assert new[4:7] == old[3:6]


def test_only_committed_rows_of_a_window_are_stored(pool):
    slots = torch.tensor([[1, 2, 3], [10, 11, 12]])
    rows = torch.full((6, 2, 4), -1.0)
    layer = SimpleNamespace(layer_id=1)
    pool.set_kv_buffer_prefix_valid(layer, slots, torch.tensor([2, 0]), rows, rows)
    key = pool.k_buffer[1][:, 0, 0].tolist()
    assert [i for i, value in enumerate(key) if value == -1.0] == [1, 2]
    assert -1.0 not in pool.k_buffer[0] and -1.0 not in pool.k_buffer[2]
