"""A small model of Llama's kind, cut as trainers and engines cut theirs. Run with a role it is one of their processes:

    llama.py RANK SHARE KIND    serves what trainer RANK has, or all of it where RANK is "whole"; of its chunks only
                                that SHARE is there. Prints its endpoint and what it has published; ends with its stdin

GQA with fewer KV heads than ranks; qkv and gate_up fused, o_proj transposed, the vocabulary padded and experts stacked
in the engine; embedding and head tied; trainers cut dimension 0 as `torch.chunk` does, which is uneven.
"""

import base64
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, it finds its neighbours

from memory.cutting import Model, Shard
from tensorhub.reshard.exported import export_of, publish_cut
from tensorhub.reshard.grid import Cutting, Grid, tiles_of
from tensorhub.transport.base import Progress

LAYERS, HIDDEN, HEAD, KV, INNER, VOCABULARY, EXPERTS, EXPERT_INNER = 3, 768, 96, 1, 1026, 5003, 7, 200
TRAINERS, RANKS = 3, 2
CHUNK = 64 * 1024
EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def shapes() -> dict[str, tuple[int, ...]]:
    """Global tensors; of the experts one for each."""
    found: dict[str, tuple[int, ...]] = {EMBED: (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        found |= {at + "q": (HIDDEN, HIDDEN), at + "k": (KV * HEAD, HIDDEN), at + "v": (KV * HEAD, HIDDEN)}
        found |= {at + "o": (HIDDEN, HIDDEN), at + "gate": (INNER, HIDDEN), at + "up": (INNER, HIDDEN)}
        found |= {at + "down": (HIDDEN, INNER), at + "norm": (HIDDEN,)}
        for expert in range(EXPERTS):
            found[f"{at}experts.{expert}.up"] = (EXPERT_INNER, HIDDEN)
            found[f"{at}experts.{expert}.down"] = (HIDDEN, EXPERT_INNER)
    return found


def model() -> Model:
    """Its content."""
    chance = np.random.default_rng(4)
    found = {name: chance.integers(0, 1 << 16, shape, np.uint16).view(np.float16) for name, shape in shapes().items()}
    found[LM_HEAD] = found[EMBED]
    return found


def chunk_of(extent: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's part begins, and how long it is, as `torch.chunk` cuts."""
    step = -(-extent // ranks)
    start = min(rank * step, extent)
    return start, min(step, extent - start)


def trainer(rank: int, ranks: int = TRAINERS) -> Shard:
    """FSDP; experts are one tensor of three dimensions, of which a rank has some whole ones."""
    shard = Shard()
    for name, shape in shapes().items():
        if "experts." in name:
            continue
        start, count = chunk_of(shape[0], rank, ranks)
        memory = np.zeros((count, *shape[1:]), np.float16)
        rest = [0] * (len(shape) - 1)
        shard.add_array(name, memory, [(name, shape, ((start, *rest), memory.shape), memory)] if count else [])
    for layer in range(LAYERS):
        for kind, shape in (("up", (EXPERT_INNER, HIDDEN)), ("down", (HIDDEN, EXPERT_INNER))):
            start, count = chunk_of(EXPERTS, rank, ranks)
            memory = np.zeros((count, *shape), np.float16)
            names = [f"layers.{layer}.experts.{start + at}.{kind}" for at in range(count)]
            placed = [(name, shape, ((0, 0), shape), memory[at]) for at, name in enumerate(names)]
            shard.add_array(f"layers.{layer}.experts.{kind}", memory, placed)
    shard.tie(EMBED, LM_HEAD)
    return shard.finish()


def engine(rank: int, ranks: int = RANKS) -> Shard:
    """Tensor parallel."""
    shard, all_ = Shard(), shapes()

    def rows(name: str, view: np.ndarray):  # type: ignore[no-untyped-def]
        extent, width = all_[name]
        count = extent // ranks
        return (name, (extent, width), ((rank * count, 0), (count, width)), view)

    def fused(name: str, parts: list[tuple[str, int]]) -> np.ndarray:
        memory, placed, at = np.zeros((sum(count for _, count in parts), HIDDEN), np.float16), [], 0
        for part, count in parts:
            view = memory[at : at + count]
            is_shared = count == all_[part][0]
            placed.append((part, all_[part], ((0, 0), all_[part]), view) if is_shared else rows(part, view))
            at += count
        shard.add_array(name, memory, placed)
        return memory

    padded = -(-VOCABULARY // (64 * ranks)) * 64
    memory = np.zeros((padded, HIDDEN), np.float16)
    start, count = rank * padded, max(0, min(padded, VOCABULARY - rank * padded))
    shard.add_array(EMBED, memory, [(EMBED, all_[EMBED], ((start, 0), (count, HIDDEN)), memory[:count])])
    norm = np.zeros(HIDDEN, np.float16)
    shard.add_array("norm", norm, [("norm", (HIDDEN,), ((0,), (HIDDEN,)), norm)])
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        half = HIDDEN // ranks
        fused(at + "qkv", [(at + "q", half), (at + "k", KV * HEAD), (at + "v", KV * HEAD)])
        fused(at + "gate_up", [(at + "gate", INNER // ranks), (at + "up", INNER // ranks)])
        turned = np.zeros((half, HIDDEN), np.float16)
        part = ((0, rank * half), (HIDDEN, half))
        shard.add_array(at + "o", turned, [(at + "o", (HIDDEN, HIDDEN), part, turned.T)])
        columns = np.zeros((HIDDEN, INNER // ranks), np.float16)
        part = ((0, rank * INNER // ranks), columns.shape)
        shard.add_array(at + "down", columns, [(at + "down", (HIDDEN, INNER), part, columns)])
        norm = np.zeros(HIDDEN, np.float16)
        shard.add_array(at + "norm", norm, [(at + "norm", (HIDDEN,), ((0,), (HIDDEN,)), norm)])
        inner = EXPERT_INNER // ranks
        up, down = np.zeros((EXPERTS, inner, HIDDEN), np.float16), np.zeros((EXPERTS, HIDDEN, inner), np.float16)
        names = [f"{at}experts.{expert}" for expert in range(EXPERTS)]
        shard.add_array(at + "w1", up, [rows(f"{name}.up", up[n]) for n, name in enumerate(names)])
        parts = [
            (f"{name}.down", (HIDDEN, EXPERT_INNER), ((0, rank * inner), (HIDDEN, inner)), down[n])
            for n, name in enumerate(names)
        ]
        shard.add_array(at + "w2", down, parts)
    shard.tie(EMBED, LM_HEAD)
    return shard.finish()


def whole() -> Shard:
    """A replica of one shard."""
    return trainer(0, 1)


def grid() -> Grid:
    """That all of them know."""
    cutting = Cutting(64 * 1024)
    for rank in range(TRAINERS):
        cutting.add_publisher(trainer(rank).table)
    cutting.add_other(whole().table)
    for rank in range(RANKS):
        cutting.add_other(engine(rank).table)
    return cutting.grid()


def main(rank: str, share: str, kind: str) -> None:
    import kit

    shard = whole() if rank == "whole" else trainer(int(rank))
    shard.fill(model())
    cut = publish_cut(shard.registration, tiles_of(shard.table, grid()))
    transport = kit.KINDS[kind].make(5.0)
    progress = Progress(-(-shard.registration.size_bytes // CHUNK))
    for chunk in range(round(float(share) * progress.chunk_count)):
        progress.mark(chunk)
    transport.export(export_of("k", cut, shard.registration, CHUNK, progress))
    print(transport.endpoint, cut.manifest.root(), base64.b64encode(cut.encode()).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
