"""The policy: a small decoder-only transformer, how it answers prompts, and how it is cut into shards.

3.4 MiB of float32 weights: little enough to learn on one core, enough for a transfer to be seen. Prompts and answers
are so short that sampling needs no cache of keys and values.
"""

from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import task

WIDTH = 192
HEADS = 4
BLOCKS = 2
SHARDS = 2  # as with pipeline parallelism: each shard is a run of blocks


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised stream and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.perceptron_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        rows, length, _ = stream.shape
        projected = self.query_key_value(self.attention_norm(stream)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.mix(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        hidden: Tensor = self.narrow(F.gelu(self.widen(self.perceptron_norm(stream))))
        return stream + hidden


class Policy(nn.Module):
    """Tokens in, logits of the next token out. The same seed gives the same weights in every process."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token = nn.Embedding(task.VOCABULARY, WIDTH)
        self.position = nn.Embedding(task.PROMPT_TOKENS + task.ANSWER_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, task.VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # at first every token is about equally likely

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def split(policy: Policy) -> list[dict[str, Tensor]]:
    """The policy's own tensors, shard by shard: the blocks in equal runs, embeddings first, head last."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    for name, tensor in policy.state_dict().items():
        match name.split("."):
            case ["blocks", block, *_]:
                shard = int(block) * SHARDS // BLOCKS
            case ["token" | "position", *_]:
                shard = 0
            case _:
                shard = SHARDS - 1
        shards[shard][name] = tensor
    return shards


def fingerprint(policy: Policy) -> str:
    """SHA-256 over the name and bytes of every parameter: the demo's own proof, which asks nothing of TensorHub."""
    digest = sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy())
    return digest.hexdigest()


@torch.no_grad()
def answer(
    policy: Policy, prompts: task.Tokens, samples: int, random: torch.Generator
) -> tuple[task.Tokens, task.Floats]:
    """Sample `samples` answers to each prompt: rows of prompt and answer, and the log-probability of each token drawn.

    The rows of one prompt lie next to each other.
    """
    asked = torch.from_numpy(prompts).long()
    logits = policy(asked)[:, -1].repeat_interleave(samples, dim=0)  # the first token needs each prompt only once
    tokens = asked.repeat_interleave(samples, dim=0)
    chosen: list[Tensor] = []
    while True:
        log_probabilities = logits.log_softmax(dim=-1)
        drawn = torch.multinomial(log_probabilities.exp(), 1, generator=random)
        chosen.append(log_probabilities.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
        if len(chosen) == task.ANSWER_TOKENS:
            return tokens.numpy().astype(np.uint8), torch.cat(chosen, dim=1).numpy()
        logits = policy(tokens)[:, -1]
