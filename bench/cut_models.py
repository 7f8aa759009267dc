"""Models of known make, cut as trainers and engines cut them: boxes of every shard, without a byte of memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tensorhub.protocol.layout import GlobalTensor, contiguous_strides
from tensorhub.reshard.grid import BoxTable, table_of_columns

DTYPE, ITEM = "bfloat16", 2


@dataclass(frozen=True)
class Model:
    """A decoder with experts. `kv_heads` 0: latent attention, as DeepSeek and Kimi have it."""

    name: str
    hidden: int
    layers: int
    dense_layers: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    inner: int
    dense_inner: int
    vocabulary: int


QWEN = Model("30B, 128 experts", 2048, 48, 0, 32, 4, 128, 128, 768, 0, 151936)
KIMI = Model("1T, 384 experts", 7168, 61, 1, 64, 0, 128, 384, 2048, 18432, 163840)
SMALL = Model("tiny, 8 experts", 256, 3, 1, 8, 2, 32, 8, 64, 512, 1000)


@dataclass(frozen=True)
class Tensor:
    """A global tensor and what engines do with it: cut rows or columns, share out experts, or keep a copy."""

    name: str
    shape: tuple[int, ...]
    way: str  # "rows", "columns", "kv", "expert-rows", "expert-columns", "copy"
    expert: int = -1


def tensors_of(model: Model) -> Iterator[Tensor]:
    """By the names that checkpoints have."""
    yield Tensor("model.embed_tokens.weight", (model.vocabulary, model.hidden), "rows")
    yield Tensor("lm_head.weight", (model.vocabulary, model.hidden), "rows")
    yield Tensor("model.norm.weight", (model.hidden,), "copy")
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        yield from _attention(model, f"{at}.self_attn")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{at}.{norm}.weight", (model.hidden,), "copy")
        if layer < model.dense_layers:
            yield from _projections(f"{at}.mlp", model.hidden, model.dense_inner, -1)
            continue
        yield Tensor(f"{at}.mlp.gate.weight", (model.experts, model.hidden), "copy")
        for expert in range(model.experts):
            yield from _projections(f"{at}.mlp.experts.{expert}", model.hidden, model.inner, expert)


def _attention(model: Model, at: str) -> Iterator[Tensor]:
    if model.kv_heads:
        yield Tensor(f"{at}.q_proj.weight", (model.heads * model.head, model.hidden), "rows")
        for which in "kv":
            yield Tensor(f"{at}.{which}_proj.weight", (model.kv_heads * model.head, model.hidden), "kv")
        for which in "qk":
            yield Tensor(f"{at}.{which}_norm.weight", (model.head,), "copy")
    else:
        yield Tensor(f"{at}.q_a_proj.weight", (1536, model.hidden), "copy")
        yield Tensor(f"{at}.q_b_proj.weight", (model.heads * 192, 1536), "rows")
        yield Tensor(f"{at}.kv_a_proj_with_mqa.weight", (576, model.hidden), "copy")
        yield Tensor(f"{at}.kv_b_proj.weight", (model.heads * 256, 512), "rows")
    yield Tensor(f"{at}.o_proj.weight", (model.hidden, model.heads * model.head), "columns")


def _projections(at: str, hidden: int, inner: int, expert: int) -> Iterator[Tensor]:
    kind = "expert-" if expert >= 0 else ""
    for which in ("gate", "up"):
        yield Tensor(f"{at}.{which}_proj.weight", (inner, hidden), f"{kind}rows", expert)
    yield Tensor(f"{at}.down_proj.weight", (hidden, inner), f"{kind}columns", expert)


Part = tuple[tuple[int, ...], tuple[int, ...]]
Cut = Callable[[Tensor, int], Part | None]


def whole(tensor: Tensor) -> Part:
    return (0,) * len(tensor.shape), tensor.shape


def piece(tensor: Tensor, d: int, rank: int, ranks: int) -> Part | None:
    """As `torch.chunk` cuts."""
    each = -(-tensor.shape[d] // ranks)
    start, stop = min(tensor.shape[d], rank * each), min(tensor.shape[d], (rank + 1) * each)
    if start == stop:
        return None
    at, size = [0] * len(tensor.shape), list(tensor.shape)
    at[d], size[d] = start, stop - start
    return tuple(at), tuple(size)


def fsdp(ranks: int) -> Cut:
    """Every tensor by rows."""
    return lambda tensor, rank: piece(tensor, 0, rank, ranks)


def experts_and_fsdp(groups: int, ranks: int, experts: int) -> Cut:
    """Experts shared out among groups of ranks, and cut by rows inside of a group; the rest cut by rows among all."""

    def cut(tensor: Tensor, rank: int) -> Part | None:
        if tensor.expert < 0:
            return piece(tensor, 0, rank, ranks)
        inside = ranks // groups
        if tensor.expert * groups // experts != rank // inside:
            return None
        return piece(tensor, 0, rank % inside, inside)

    return cut


def tensor_parallel(model: Model, ranks: int, *, shares_experts: bool = False) -> Cut:
    """As engines cut: rows, columns, whole heads (one on several ranks where there are fewer), experts."""

    def cut(tensor: Tensor, rank: int) -> Part | None:
        if tensor.expert >= 0 and shares_experts:
            return whole(tensor) if tensor.expert * ranks // model.experts == rank else None
        match tensor.way:
            case "rows" | "expert-rows":
                return piece(tensor, 0, rank, ranks)
            case "columns" | "expert-columns":
                return piece(tensor, 1, rank, ranks)
            case "kv":
                return piece(tensor, 0, rank * min(ranks, model.kv_heads) // ranks, min(ranks, model.kv_heads))
        return whole(tensor)

    return cut


def table_of_rank(tensors: list[Tensor], cut: Cut, rank: int) -> BoxTable:
    """One shard: each part contiguous, one after another, so that neighbours are fused as engines fuse them."""
    mine = [(tensor, part) for tensor in tensors if (part := cut(tensor, rank)) is not None]
    known = sorted((tensor.name, tensor.shape) for tensor, _ in mine)
    index = {name: n for n, (name, _) in enumerate(known)}
    columns = np.zeros((len(mine), 8), np.int64)
    columns[:, 4:6] = 1
    offset = 0
    for row, (tensor, (at, size)) in enumerate(mine):
        missing = 2 - len(size)
        columns[row, 0], columns[row, 1] = index[tensor.name], offset
        columns[row, 2 + missing : 4], columns[row, 4 + missing : 6] = at, size
        steps = zip(contiguous_strides(size), size, strict=True)
        columns[row, 6 + missing : 8] = [step * ITEM if count > 1 else 0 for step, count in steps]
        offset += int(np.prod(size)) * ITEM
    return table_of_columns(tuple(GlobalTensor(name, DTYPE, shape) for name, shape in known), offset, columns)
