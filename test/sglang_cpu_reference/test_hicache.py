from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_cpu_reference import hicache  # noqa: E402

LAYERS, PAGES, PAGE, HEADS, DIM = 3, 4, 2, 2, 4
TOKENS = PAGES * PAGE
SHAPES = {
    "layer_first": (LAYERS, TOKENS, HEADS, DIM),
    "page_first": (TOKENS, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (PAGES, HEADS, PAGE, LAYERS, DIM),
}


def make_pool(layout):
    def device():
        return tuple(torch.randn(20, HEADS, DIM) for _ in range(LAYERS))

    return SimpleNamespace(
        layout=layout,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        k_buffer=torch.zeros(SHAPES[layout]),
        v_buffer=torch.zeros(SHAPES[layout]),
        device_k_buffers=device(),
        device_v_buffers=device(),
    )


@pytest.mark.parametrize("layout", SHAPES)
def test_backup_then_load_restores_every_layer(layout):
    pool = make_pool(layout)
    host, device = torch.tensor([2, 3, 6, 7]), torch.tensor([9, 8, 1, 5])
    buffers = (*pool.device_k_buffers, *pool.device_v_buffers)
    saved = [buffer.clone() for buffer in buffers]
    hicache.backup_from_device_all_layer(pool, None, host, device, "kernel")
    for buffer in buffers:
        buffer[device] = 0
    for layer in range(LAYERS):
        hicache.load_to_device_per_layer(pool, None, host, device, layer, "kernel")
    for buffer, original in zip(buffers, saved, strict=True):
        assert torch.equal(buffer, original)


@pytest.mark.parametrize("layout", SHAPES)
def test_a_token_lies_where_the_layout_says(layout):
    pool = make_pool(layout)
    host, device = torch.tensor([5]), torch.tensor([7])
    hicache.backup_from_device_all_layer(pool, None, host, device, "direct")
    row = pool.device_k_buffers[1][7]
    found = {
        "layer_first": lambda b: b[1, 5],
        "page_first": lambda b: b[5, 1],
        "page_first_direct": lambda b: b[2, 1, 1],
        "page_head": lambda b: b[2, :, 1, 1],
    }[layout](pool.k_buffer)
    assert torch.equal(found, row)


def test_a_layer_past_the_target_is_left_to_the_draft():
    pool = make_pool("layer_first")
    pool.target_layer_num = 2
    index = torch.tensor([1])
    before = pool.device_k_buffers[2].clone()
    hicache.load_to_device_per_layer(pool, None, index, index, 2, "kernel")
    assert torch.equal(pool.device_k_buffers[2], before)
    hicache.load_to_device_per_layer(
        pool, None, index, index, 2, "kernel", is_draft=True
    )
    assert not pool.device_k_buffers[2][1].any()


def test_an_unknown_layout_names_the_flag():
    with pytest.raises(NotImplementedError, match="--hicache-mem-layout"):
        hicache.layer_view(torch.zeros(1), "page_unified", 0)


@pytest.mark.parametrize("by_position", [True, False])
def test_host_pools_are_never_pinned(by_position):
    seen = {}

    def init(self, layout, pin_memory, device="cpu"):
        seen.update(layout=layout, pin_memory=pin_memory, device=device)

    if by_position:
        hicache.unpin(init, "pool", "page_first", True)
    else:
        hicache.unpin(init, "pool", layout="page_first", pin_memory=True)
    assert seen == {"layout": "page_first", "pin_memory": False, "device": "cpu"}


def test_device_buffers_of_an_older_host_pool_are_its_device_pools():
    device = SimpleNamespace(k_buffer=["k"], v_buffer=["v"])
    older = SimpleNamespace(device_pool=device)
    assert hicache.device_buffers(older) == (["k"], ["v"])
