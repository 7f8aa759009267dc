"""The policy of the demo with vLLM: a small Llama and its tokenizer, made on the spot.

A token for each letter of the task, whose number is the letter's place in the alphabet, one for the end of the prompt
as in `task`, and the two that every tokenizer has. So what the engine samples is what `task` and `grpo` count with.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .. import task

WIDTH = 128
HEADS, KEY_HEADS, HEAD_WIDTH = 4, 2, 32
LAYERS = 2
SPECIAL = ("<end>", "<unknown>")
PUBLISHED = torch.bfloat16  # the optimizer works on float32
NAMES = [*task.ALPHABET, "=", *SPECIAL]


def make(folder: Path) -> str:
    """Write down what vLLM and transformers want to find: the shape of the model and its tokenizer, no weights."""
    end = len(NAMES) - 2
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(NAMES),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=64,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({name: at for at, name in enumerate(NAMES)}, unk_token=SPECIAL[1]))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=SPECIAL[0], unk_token=SPECIAL[1])
    tokenizer.save_pretrained(folder)
    return str(folder)


def build(folder: Path, seed: int) -> LlamaForCausalLM:
    """The untrained policy. The same seed gives the same weights in every process."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float()


def rounded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is published of these."""
    return {name: tensor.detach().to(PUBLISHED).contiguous() for name, tensor in tensors.items()}


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and values, as float32: in it fit what is published, and what vLLM computes with."""
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().contiguous().numpy().data)
    return digest.hexdigest()


def unfused(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """vLLM's parameters by the names of the checkpoint, without a copy.

    What it has fused is taken apart, and the rows that it adds to the vocabulary are left out.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in parameters.items():
        if "qkv_proj" in name:
            parts = {"q_proj": HEADS * HEAD_WIDTH, "k_proj": KEY_HEADS * HEAD_WIDTH, "v_proj": KEY_HEADS * HEAD_WIDTH}
            fused = "qkv_proj"
        elif "gate_up_proj" in name:
            parts, fused = {"gate_proj": 3 * WIDTH, "up_proj": 3 * WIDTH}, "gate_up_proj"
        else:
            found[name] = tensor[: len(NAMES)] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
            continue
        for part, piece in zip(parts, torch.split(tensor, list(parts.values())), strict=True):
            found[name.replace(fused, part)] = piece
    return found
