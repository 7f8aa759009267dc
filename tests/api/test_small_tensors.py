"""Thousands of small tensors, each an allocation of its own, between large, tied, transposed and empty ones."""

import pytest

torch = pytest.importorskip("torch")

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8)
COUNT = 900


def model(seed: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Its tensors, and what was allocated between them. Of seed 0: zeros."""
    random = torch.Generator().manual_seed(seed)

    def filled(size_bytes: int) -> torch.Tensor:
        if seed == 0:
            return torch.zeros(size_bytes, dtype=torch.uint8)
        return torch.randint(0, 2, (size_bytes,), dtype=torch.uint8, generator=random)  # a bool has no other bytes

    found: dict[str, torch.Tensor] = {}
    guards: list[torch.Tensor] = []
    for index in range(COUNT):
        size_bytes = 8 * (1 + index * 37 % 300)
        found[f"small-{index}"] = filled(size_bytes).view(DTYPES[index % len(DTYPES)])
        guards.append(torch.full((48,), 7, dtype=torch.uint8))
        if index % 300 == 150:
            found[f"large-{index}"] = filled(3 << 20).view(torch.float32)
            found[f"empty-{index}"] = torch.empty(0, 3)
            found[f"turned-{index}"] = filled(64).view(4, 16).t()
            found[f"tied-{index}"] = found[f"small-{index - 1}"]
    return found, guards


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_all_of_them_arrive_and_nothing_beside_them_is_touched(join, transport: str) -> None:
    (ours, _), (theirs, guards) = model(1), model(0)
    options = {"transports": [transport], "chunk_bytes": 1 << 18}
    trainer, _ = join("t", tensors=ours, **options)
    rollout, _ = join("r", tensors=theirs, **options)
    last, _ = model(0)
    third, _ = join("r2", tensors=last, **options)
    trainer.publish(1)
    rollout.replicate(1)
    assert set(rollout.statistics()["bytes_by_transport"]) == {transport}
    for version in (2, 3):
        trainer.unpublish()
        for tensor in ours.values():
            tensor.view(torch.uint8).bitwise_xor_(1)
        trainer.publish(version)
        assert rollout.update() == version
        for name, tensor in ours.items():
            assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name
    assert all(bool((guard == 7).all()) for guard in guards)
    trainer.unpublish()
    assert third.replicate() == 3, "what was received is served too"
    assert all(torch.equal(last[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in ours.items())
