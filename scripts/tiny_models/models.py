"""The target and the DSpark draft in plain PyTorch, with SGLang's names and math.

Parameters carry the names of the checkpoint, so `state_dict()` is the checkpoint.
Everything is float32 and batch-first; positions start at 0.

Life cycle: `Target` is trained first and frozen. `Draft` shares the target's
embedding and head (they are passed in, never stored), reads the target's hidden
rows of `TARGET_LAYER_IDS` and proposes one block of `GAMMA` tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GAMMA = 4
TARGET_LAYER_IDS = (0, 1, 2)
MARKOV_RANK = 16


@dataclass(frozen=True)
class Shape:
    """Sizes shared by target and draft; only the layer count differs."""

    layers: int
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    vocab: int = 260
    rope_theta: float = 10000.0
    eps: float = 1e-6
    max_positions: int = 1024

    def as_dict(self) -> dict:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate halves (NeoX style). x: [B, heads, T, D]; positions: [T] or [B, T]."""
    half = x.shape[-1] // 2
    inv = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.to(torch.float32)[..., None] * inv
    if angle.dim() == 3:
        angle = angle[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps)
        self.k_norm = RMSNorm(s.head_dim, s.eps)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.s.head_dim)).transpose(1, 2)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q_norm(self._heads(self.q_proj(x), self.s.heads))
        return rope(q, positions, self.s.rope_theta)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V of rows x: [B, kv_heads, T, D] each."""
        k = self.k_norm(self._heads(self.k_proj(x), self.s.kv_heads))
        v = self._heads(self.v_proj(x), self.s.kv_heads)
        return rope(k, positions, self.s.rope_theta), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """mask None means plain causal; True entries of a mask are attended."""
        group = self.s.heads // self.s.kv_heads
        out = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.mlp = MLP(s)

    def finish(self, x: Tensor, attention: Tensor) -> Tensor:
        x = x + attention
        return x + self.mlp(self.post_attention_layernorm(x))


class _Backbone(nn.Module):
    """Holds what a Qwen3 checkpoint keeps under the prefix `model.`."""

    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList([Layer(s) for _ in range(s.layers)])
        self.norm = RMSNorm(s.hidden, s.eps)


class Target(nn.Module):
    """Qwen3 with tied embedding and head."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.model = _Backbone(s)
        _initialise(self)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> logits [B, T, V] and context rows [B, T, K * hidden].

        A context row is the concatenation, over `TARGET_LAYER_IDS`, of the residual
        stream after that layer, before any norm.
        """
        positions = torch.arange(ids.shape[1])
        x = self.model.embed_tokens(ids)
        rows = []
        for index, layer in enumerate(self.model.layers):
            h, attn = layer.input_layernorm(x), layer.self_attn
            out = attn.attend(
                attn.query(h, positions), *attn.key_value(h, positions), None
            )
            x = layer.finish(x, out)
            if index in TARGET_LAYER_IDS:
                rows.append(x)
        return self.head(self.model.norm(x)), torch.cat(rows, dim=-1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.model.embed_tokens.weight.T


class MarkovHead(nn.Module):
    """Bias on a block position's logits from the token before it."""

    def __init__(self, vocab: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(previous))


class Draft(nn.Module):
    """DSpark draft: context K/V from projected target rows, one block at a time.

    window None: full attention, bidirectional inside the block. window w: every row
    attends to itself and the w - 1 rows before it, causal inside the block too.
    """

    def __init__(self, s: Shape, window: int | None):
        super().__init__()
        self.s, self.window = s, window
        self.fc = nn.Linear(len(TARGET_LAYER_IDS) * s.hidden, s.hidden, bias=False)
        self.hidden_norm = RMSNorm(s.hidden, s.eps)
        self.layers = nn.ModuleList([Layer(s) for _ in range(s.layers)])
        self.norm = RMSNorm(s.hidden, s.eps)
        self.markov_head = MarkovHead(s.vocab, MARKOV_RANK)
        _initialise(self)

    def mask(self, anchors: Tensor, length: int) -> Tensor:
        """Who a block row sees. anchors [B, A] -> bool [B, 1, A*G, length + A*G].

        Block row j of anchor p stands at position p + j. It sees the context rows
        0 .. p - 1 and rows of its own block.
        """
        count = anchors.shape[1]
        offset = torch.arange(GAMMA).repeat(count)
        first = anchors.repeat_interleave(GAMMA, 1)[..., None]
        query = first + offset[:, None]
        position = torch.arange(length)
        context = position < first
        block = torch.arange(count).repeat_interleave(GAMMA)
        inside = block[:, None] == block
        if self.window is not None:
            context = context & (position > query - self.window)
            inside = inside & (offset <= offset[:, None])
        inside = inside.expand(anchors.shape[0], -1, -1)
        return torch.cat([context, inside], dim=-1)[:, None]

    def forward(self, rows: Tensor, block: Tensor, anchors: Tensor) -> Tensor:
        """Final hidden rows of every block.

        rows [B, T, K * hidden]: target context rows of positions 0 .. T - 1.
        block [B, A * GAMMA, hidden]: embeddings of [anchor, mask, mask, mask].
        anchors [B, A]: position of each block's first row. -> [B, A * GAMMA, hidden]
        """
        length = rows.shape[1]
        mask = self.mask(anchors, length)
        offset = torch.arange(GAMMA).repeat(anchors.shape[1])
        positions = anchors.repeat_interleave(GAMMA, 1) + offset
        context = self.hidden_norm(self.fc(rows))
        x = block
        for layer in self.layers:
            h, attn = layer.input_layernorm(x), layer.self_attn
            ck, cv = attn.key_value(context, torch.arange(length))
            bk, bv = attn.key_value(h, positions)
            out = attn.attend(
                attn.query(h, positions),
                torch.cat([ck, bk], dim=2),
                torch.cat([cv, bv], dim=2),
                mask,
            )
            x = layer.finish(x, out)
        return self.norm(x)


def _initialise(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            # Residual writers start small so that depth does not add variance.
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 if small else 0.05)
