from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt")

from naive_attention import naive_attention  # noqa: E402

from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang_cpu_reference.attention_backend import (  # noqa: E402
    ReferenceAttentionBackend,
)
from sglang_cpu_reference.kv_pool import ReferenceMHATokenToKVPool  # noqa: E402

HEADS, KV_HEADS, DIM, SLOTS, ROOM = 4, 2, 8, 96, 32
SCALE = DIM**-0.5


class Bench:
    """A backend on a small pool, and each request's full keys and values."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.pool = ReferenceMHATokenToKVPool(
            size=SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=DIM,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        table = torch.zeros(len(lengths), ROOM, dtype=torch.int32)
        free = torch.randperm(SLOTS, generator=self.random) + 1
        for row, length in enumerate(lengths):
            table[row, :length] = free[:length].to(torch.int32)
            free = free[length:]
        self.table, self.lengths = table, lengths
        self.keys = [self._rows(length, KV_HEADS) for length in lengths]
        self.values = [self._rows(length, KV_HEADS) for length in lengths]
        self.backend = ReferenceAttentionBackend(
            SimpleNamespace(
                req_to_token_pool=SimpleNamespace(req_to_token=table),
                token_to_kv_pool=self.pool,
            )
        )

    def _rows(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, DIM, generator=self.random)

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        return self.table[row, start:stop].to(torch.int64)

    def run(self, mode, new, layer, requests=None, save=True, **extra):
        """One forward of the last ``new[i]`` rows of each request.

        Returns the backend's output and the definition's, both flattened.
        """
        requests = list(range(len(self.lengths))) if requests is None else requests
        queries = [self._rows(new[r], HEADS) for r in requests]
        starts = [self.lengths[r] - new[r] for r in requests]
        for row, start in zip(requests, starts, strict=True):
            slots = self.slots(row, 0, start)
            self.pool.k_buffer[0][slots] = self.keys[row][:start]
            self.pool.v_buffer[0][slots] = self.values[row][:start]
        batch = self._batch(mode, new, requests, starts, **extra)
        self.backend.init_forward_metadata(batch)
        got = self.backend.forward(
            torch.cat(queries).flatten(1),
            torch.cat([self.keys[r][-new[r] :] for r in requests]),
            torch.cat([self.values[r][-new[r] :] for r in requests]),
            layer,
            batch,
            save_kv_cache=save,
        )
        return got, self._defined(queries, requests, layer)

    def _batch(self, mode, new, requests, starts, **extra):
        verify = mode == ForwardMode.TARGET_VERIFY
        lens = starts if verify else [self.lengths[r] for r in requests]
        ends = [self.lengths[r] for r in requests]
        locs = [self.slots(*span) for span in zip(requests, starts, ends, strict=True)]
        fields = {
            "forward_mode": mode,
            "seq_lens": torch.tensor(lens),
            "extend_seq_lens": torch.tensor([new[r] for r in requests]),
            "req_pool_indices": torch.tensor(requests),
            "input_ids": torch.zeros(sum(new[r] for r in requests)),
            "out_cache_loc": torch.cat(locs),
            "out_cache_loc_is_physical": True,
            "spec_info": SimpleNamespace(custom_mask=None),
        }
        fields.update(extra)
        return SimpleNamespace(**fields)

    def _defined(self, queries, requests, layer):
        return torch.cat(
            [
                naive_attention(
                    query,
                    self.keys[row],
                    self.values[row],
                    scale=SCALE,
                    causal=layer.attn_type != AttentionType.ENCODER_ONLY,
                    window_left=layer.sliding_window_size,
                )
                for query, row in zip(queries, requests, strict=True)
            ]
        ).flatten(1)


def make_layer(attn_type=AttentionType.DECODER, window=-1, **extra):
    fields = {
        "layer_id": 0,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": KV_HEADS,
        "v_head_dim": DIM,
        "scaling": SCALE,
        "attn_type": attn_type,
        "sliding_window_size": window,
        "is_cross_attention": False,
        "logit_cap": 0.0,
        "k_scale": None,
        "v_scale": None,
    }
    fields.update(extra)
    return SimpleNamespace(**fields)


def check(got, want):
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


WINDOWS = pytest.mark.parametrize("window", [-1, 4], ids=["full", "sliding"])


@WINDOWS
def test_extend_of_fresh_and_of_partly_cached_prompts(window):
    bench = Bench([7, 12, 3])
    check(*bench.run(ForwardMode.EXTEND, [7, 5, 1], make_layer(window=window)))


@WINDOWS
def test_decode(window):
    bench = Bench([7, 12, 1])
    check(*bench.run(ForwardMode.DECODE, [1, 1, 1], make_layer(window=window)))


@WINDOWS
def test_target_verify_is_causal_after_the_prefix(window):
    bench = Bench([9, 17])
    check(*bench.run(ForwardMode.TARGET_VERIFY, [5, 5], make_layer(window=window)))


@WINDOWS
def test_draft_block_positions_see_the_whole_block(window):
    layer = make_layer(AttentionType.ENCODER_ONLY, window)
    bench = Bench([9, 17])
    check(*bench.run(ForwardMode.TARGET_VERIFY, [4, 4], layer))
    causal_layer = make_layer(AttentionType.DECODER, window)
    same = Bench([9, 17])
    causal, _ = same.run(ForwardMode.TARGET_VERIFY, [4, 4], causal_layer)
    again = Bench([9, 17])
    open_block, _ = again.run(ForwardMode.TARGET_VERIFY, [4, 4], layer)
    assert not torch.allclose(causal, open_block)


def test_new_rows_are_stored_only_when_asked():
    bench = Bench([6])
    slots = bench.slots(0, 4, 6)
    check(*bench.run(ForwardMode.EXTEND, [2], make_layer(), save=False))
    assert not bench.pool.k_buffer[0][slots].any()
    check(*bench.run(ForwardMode.EXTEND, [2], make_layer()))
    assert torch.equal(bench.pool.k_buffer[0][slots], bench.keys[0][4:])


def test_a_request_does_not_depend_on_its_batch():
    layer = make_layer()
    alone, _ = Bench([9, 17], seed=3).run(ForwardMode.TARGET_VERIFY, [5, 5], layer)
    bench = Bench([9, 17], seed=3)
    rows = [bench._rows(5, HEADS), bench._rows(5, HEADS)]
    bench._rows = lambda count, heads: rows[1]
    single, _ = bench.run(ForwardMode.TARGET_VERIFY, [5, 5], layer, requests=[1])
    assert torch.equal(alone[5:], single)


def test_idle_forward_returns_nothing_to_attend():
    bench = Bench([3])
    bench.backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    out = bench.backend.forward(
        torch.zeros(0, HEADS * DIM), None, None, make_layer(), None
    )
    assert out.shape == (0, HEADS * DIM)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"spec_info": SimpleNamespace(custom_mask=torch.ones(1))}, "custom mask"),
        ({"input_ids": torch.zeros(9)}, "9 rows for 2 requests"),
    ],
)
def test_verify_that_is_not_a_chain_is_refused(extra, message):
    bench = Bench([9, 17])
    with pytest.raises(NotImplementedError, match=message):
        bench.run(ForwardMode.TARGET_VERIFY, [5, 5], make_layer(), **extra)


def test_unserved_layer_features_are_refused_by_name():
    bench = Bench([3])
    with pytest.raises(NotImplementedError, match="logit cap"):
        bench.run(ForwardMode.EXTEND, [3], make_layer(logit_cap=30.0))


def test_a_pool_of_another_kind_is_refused():
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        token_to_kv_pool=object(),
    )
    with pytest.raises(NotImplementedError, match="multi-head"):
        ReferenceAttentionBackend(runner)
