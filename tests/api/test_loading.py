"""`load`: tensors from the store alone."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub import aio, loading
from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.runtime import answers

SAID = {"step": 3}


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tied, overlapping, transposed, empty, unaligned beside each other, and of many dtypes."""
    torch.manual_seed(3)
    fused = torch.randn(6, 4)
    head = torch.randn(8, 4).to(torch.bfloat16)
    return {
        "embed": head,
        "one": torch.tensor([7], dtype=torch.int8),
        "q": fused[:4],
        "rest": fused[2:],
        "bias": torch.randn(3, dtype=torch.float64),
        "t": torch.randn(5, 2).t(),
        "head": head,
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False]),
        "low": torch.randn(4).to(torch.float8_e4m3fn),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_like = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_like and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_every_kind_of_tensor_comes_as_it_was_published(server, join):
    given = odd_tensors()
    trainer, _ = join("t", tensors=given)
    trainer.publish(3, metadata=SAID)
    found = tensorhub.load("m@latest", server=server.address)
    assert isinstance(found, dict)
    assert (found.model, found.version, found.metadata, list(found)) == ("m", 3, SAID, list(given))
    for name, tensor in given.items():
        if tensor.numel() and tensor.dim():
            assert same(found[name], tensor), name
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    assert found["scalar"] == 2.5
    assert found["t"].stride() == given["t"].stride()
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    found["q"][3] = 9.0
    assert (found["rest"][1] == 9.0).all(), "what shared memory there shares it here"
    assert repr(found) == "<11 tensors of m@3>"


def test_they_are_the_callers_alone_and_nobody_is_left(server, join):
    trainer, array = join("t", 1.0)
    trainer.publish(1)
    before = threading.active_count()
    found = tensorhub.load("m@1", server=server.address)
    found["w"] += 1
    with trainer.mutating(version=2):
        array += 5
    assert (found["w"] == 2.0).all()
    view = tensorhub.connect(server.address)
    eventually(lambda: [replica.name for replica in view.replicas("m")] == ["t"], "the loader has left")
    eventually(lambda: threading.active_count() <= before, "its threads have ended")
    assert (tensorhub.load("m@latest", server=server.address)["w"] == 6.0).all()


def test_all_shards_of_one_version(server, join):
    shards = [join("t", float(shard), shard=shard, shards=3)[0] for shard in range(3)]
    in_threads(*(lambda s=s: s.publish(1, metadata=SAID) for s in shards))
    with pytest.raises(tensorhub.UsageError, match="m has 3 shards"):
        tensorhub.load("m@latest", server=server.address)
    found = tensorhub.load_shards("m@latest", server=server.address)
    assert [(each.version, each.metadata, float(each["w"][0])) for each in found] == [
        (1, SAID, float(shard)) for shard in range(3)
    ]


def test_what_is_not_there_is_said_at_once(server, join):
    join("t", 1.0)
    for reference, error, match in (
        ("m", tensorhub.UsageError, "names no version of a model"),
        ("@latest", tensorhub.UsageError, "model=''"),
        ("m@newest", tensorhub.UsageError, "names no version"),
        ("m@", tensorhub.UsageError, "names no version"),
        (7, tensorhub.UsageError, "names no version of a model"),
        ("n@latest", tensorhub.VersionUnavailable, "no model 'n' is known"),
        ("m@latest", tensorhub.VersionUnavailable, "no version of m yet"),
        ("m@9", tensorhub.VersionUnavailable, "no version 9"),
    ):
        with pytest.raises(error, match=match):
            tensorhub.load(reference, server=server.address, timeout=5)


def test_what_cannot_be_verified_is_refused_unless_that_is_wanted(server, join):
    trainer, _ = join("t", 4.0, verify="none")
    trainer.publish(1)
    with pytest.raises(tensorhub.UsageError, match="cannot be verified"):
        tensorhub.load("m@1", server=server.address)
    assert (tensorhub.load("m@1", server=server.address, verify="none")["w"] == 4.0).all()
    view = tensorhub.connect(server.address)
    eventually(lambda: [replica.name for replica in view.replicas("m")] == ["t"], "the loaders have left")


@pytest.mark.parametrize("boxes", [None, {}], ids=["a layout", "boxes"])
def test_what_a_publisher_says_of_its_tensors_is_checked_before_memory_is_laid_out(server, join, monkeypatch, boxes):
    trainer, _ = join("t")
    trainer.register({"w": np.zeros(4, np.float32)}, boxes=boxes)
    trainer.publish(1)
    describe, living_layouts = answers.describe, answers.living_layouts
    monkeypatch.setattr(loading, "allocate", lambda layout: pytest.fail(f"memory for {layout}"))
    if boxes is None:
        evil = Layout((TensorSpec("w", "object", (4,), (1,), 0, 16),), 16).encode()
        monkeypatch.setattr(answers, "describe", lambda *given: replace(describe(*given), layout=evil))
    else:
        monkeypatch.setattr(
            answers, "living_layouts", lambda *given: replace(living_layouts(*given), boxes=(b"nonsense",))
        )
    for ask in (
        lambda: tensorhub.load("m@latest", server=server.address, timeout=20),
        lambda: tensorhub.connect(server.address, timeout=20).layout("m", "latest"),
    ):
        with pytest.raises(tensorhub.CorruptTransfer, match="m/t"):
            ask()


def test_a_load_that_is_given_up_leaves_nobody(server, join):
    trainer, _ = join("t", 1.0, size=4_000_000)
    trainer.publish(1)

    view = tensorhub.connect(server.address)

    async def give_up():
        loading = asyncio.ensure_future(aio.load("m@latest", server=server.address))
        await asyncio.to_thread(eventually, lambda: len(view.replicas("m")) > 1 or loading.done(), "it has joined")
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(give_up())
    eventually(lambda: [replica.name for replica in view.replicas("m")] == ["t"], "the loader has left")
