"""What goes to disk: checkpoints, their configs, the tokenizer, the manifest.

Weights are stored as bfloat16 and are exact: training ends by rounding them, and
everything after (the draft's training, every measurement) uses the rounded ones.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn

from .models import GAMMA, MARKOV_RANK, TARGET_LAYER_IDS, Draft, Shape, Target
from .training import MASK_TOKEN_ID

EOS_TOKEN_ID, PAD_TOKEN_ID = 256, 258
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>", "<|pad|>", "<|reserved|>")
MANIFEST = "MANIFEST.json"

#: The prompt is the messages' contents, joined: the model only knows how to go on.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def round_weights(module: nn.Module) -> None:
    """Make every parameter exactly representable in bfloat16, in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def write_checkpoint(module: nn.Module, config: dict, folder: Path) -> None:
    """`model.safetensors` (bfloat16) and `config.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in module.state_dict().items()}
    data = save(state, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    write_json(folder / "config.json", config)


def read_checkpoint(module: nn.Module, folder: Path) -> None:
    """Load `model.safetensors` into a float32 module; names must agree exactly."""
    state = load_file(folder / "model.safetensors")
    module.load_state_dict({k: v.float() for k, v in state.items()})


def _common_config(s: Shape) -> dict:
    return {
        "model_type": "qwen3",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "rope_theta": s.rope_theta,
        "max_position_embeddings": s.max_positions,
        "vocab_size": s.vocab,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
    }


def target_config(target: Target) -> dict:
    """Config of a Qwen3 target with tied head."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_common_config(target.s),
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }


def draft_config(draft: Draft, target: Target) -> dict:
    """Config of a DSpark draft; `sliding_window` counts the query's own row."""
    sliding = draft.window is not None
    kind = "sliding_attention" if sliding else "full_attention"
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_common_config(draft.s),
        "tie_word_embeddings": False,
        "layer_types": [kind] * draft.s.layers,
        "use_sliding_window": sliding,
        "sliding_window": draft.window,
        "max_window_layers": 0 if sliding else draft.s.layers,
        "block_size": GAMMA,
        "num_target_layers": target.s.layers,
        "target_layer_ids": list(TARGET_LAYER_IDS),
        "mask_token": SPECIAL_TOKENS[MASK_TOKEN_ID - EOS_TOKEN_ID],
        "mask_token_id": MASK_TOKEN_ID,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


def write_tokenizer(folder: Path) -> None:
    """Byte-level tokenizer: token id = byte value, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte that byte-level tokenizers agree on:
    printable Latin-1 stands for itself, the rest for code points from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def file_record(root: Path) -> dict[str, dict]:
    """sha256 and size of every file below `root`, the manifest left out."""
    record = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            data = path.read_bytes()
            record[path.relative_to(root).as_posix()] = {
                "sha256": hashlib.sha256(data).hexdigest(),
                "bytes": len(data),
            }
    return record


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
