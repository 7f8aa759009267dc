"""The recipes of docs/layouts.md: pipeline stages, experts, quantised tensors with their scales."""

import pytest
import torch

import tensorhub
from runtime.kit import in_threads
from tensorhub import Box

LAYERS, HIDDEN, EXPERTS = 4, 32, 6


@pytest.fixture
def join(server):
    """`join(replica, tensors, boxes)` opens a worker of the model that has registered them."""
    opened = []

    def joined(replica, tensors, boxes, **options):
        weights = tensorhub.open("m", replica=replica, server=server.address, call_timeout=20, **options)
        opened.append(weights)
        weights.register(tensors, boxes=boxes)
        return weights

    yield joined
    for weights in reversed(opened):
        weights.close(timeout=3)


def layers(numbers, value=0.0):
    return {f"layers.{n}.w": torch.full((HIDDEN, HIDDEN), value + n) for n in numbers}


def test_pipeline_stages_to_one_process_and_to_other_stages(join):
    """Each stage registers the layers that it has, whole: together they are the model."""
    cuts = {"trainer": ((0, 1), (2, 3)), "other": ((0,), (1, 2), (3,))}
    stages = {
        name: [
            (join(name, mine := layers(numbers, 10.0 * (name == "trainer")), {}, shard=s, shards=len(cut)), mine)
            for s, numbers in enumerate(cut)
        ]
        for name, cut in cuts.items()
    }
    engine = layers(range(LAYERS))
    whole = join("engine", engine, {})
    assert in_threads(*(lambda w=w: w.publish(1) for w, _ in stages["trainer"])) == [1, 1]
    assert whole.replicate() == 1
    assert in_threads(*(lambda w=w: w.replicate() for w, _ in stages["other"])) == [1, 1, 1]
    for found in (engine, *(mine for _, mine in stages["other"])):
        for name, tensor in found.items():
            assert torch.equal(tensor, torch.full((HIDDEN, HIDDEN), 10.0 + int(name.split(".")[1])))


def test_experts_one_by_one_to_experts_that_are_stacked_on_two_ranks(join):
    names = [f"experts.{n}.w" for n in range(EXPERTS)]
    trained = {name: torch.full((8, HIDDEN), float(n)) for n, name in enumerate(names)}
    trainer = join("trainer", trained, {})
    each = EXPERTS // 2
    stacked = [torch.zeros(each, 8, HIDDEN) for _ in range(2)]

    def boxes(rank):
        here = names[rank * each : (rank + 1) * each]
        return {"w": [Box(n, (8, HIDDEN), (0, 0), (8, HIDDEN), offset=i * 8 * HIDDEN) for i, n in enumerate(here)]}

    ranks = [join("engine", {"w": stacked[r]}, boxes(r), shard=r, shards=2) for r in range(2)]
    trainer.publish(1)
    assert in_threads(*(lambda w=w: w.replicate() for w in ranks)) == [1, 1]
    assert torch.equal(torch.cat(stacked), torch.stack(list(trained.values())))


def test_quantised_tensors_and_their_scales_are_of_one_version_in_any_layout(join):
    """Blocks of 16 rows have a scale each: an engine that takes half of the rows takes half of the scales."""

    def tensors(value):
        weight = torch.full((HIDDEN, HIDDEN), value).to(torch.float8_e4m3fn)
        return {"w": weight, "w_scale": torch.full((HIDDEN // 16, 1), value)}

    trained = tensors(1.0)
    trainer = join("trainer", trained, {})
    half, ranks = HIDDEN // 2, []
    for rank in range(2):
        mine = {"w": torch.zeros(half, HIDDEN).to(torch.float8_e4m3fn), "w_scale": torch.zeros(1, 1)}
        cut = {
            "w": [Box("w", (HIDDEN, HIDDEN), (rank * half, 0), (half, HIDDEN))],
            "w_scale": [Box("w_scale", (2, 1), (rank, 0), (1, 1))],
        }
        ranks.append((join("engine", mine, cut, shard=rank, shards=2), mine))
    for version in (1, 2, 3):
        with trainer.mutating(version=version):
            for name, tensor in tensors(float(version)).items():
                trained[name].copy_(tensor)
        assert in_threads(*(lambda w=w: w.update() for w, _ in ranks)) == [version, version]
        for _, mine in ranks:
            assert mine["w"].float().unique().tolist() == mine["w_scale"].unique().tolist() == [float(version)]
