"""What a version is, for somebody who has registered nothing: `view.layout` and `view.metadata`."""

import numpy as np
import pytest
from msgspec.structs import replace

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub.protocol.status import TensorView
from tensorhub.runtime import descriptions

SAID = {"step": 7}


def test_names_dtypes_and_shapes(server, join):
    tied = np.zeros((4, 3), np.float32)
    tensors = {"a": tied, "b": np.zeros(5, np.int64), "tied": tied, "t": np.zeros((2, 6), np.uint8).T}
    trainer, _ = join("t", tensors=tensors)
    view = tensorhub.connect(server.address)
    with pytest.raises(tensorhub.VersionUnavailable, match="no version of m yet"):
        view.layout("m")
    trainer.publish(7)
    found = view.layout("m", "latest")
    assert (found.model, found.version, found.size_bytes) == ("m", 7, 48 + 40 + 12)
    assert found.shards == (
        (
            TensorView("a", "float32", (4, 3)),
            TensorView("b", "int64", (5,)),
            TensorView("tied", "float32", (4, 3)),
            TensorView("t", "uint8", (6, 2)),
        ),
    )
    assert not found.is_whole, "nobody said boxes"
    assert view.layout("m", 7) == found
    with pytest.raises(tensorhub.VersionUnavailable, match="m has no version 8"):
        view.layout("m", 8)
    with pytest.raises(tensorhub.VersionUnavailable, match="no model 'n' is known"):
        view.layout("n")
    with pytest.raises(tensorhub.UsageError, match="names no version"):
        view.layout("m", "newest")


def test_every_shard(server, join):
    sizes = (10, 20)
    shards = [join("t", tensors={"w": np.zeros(size)}, shard=shard, shards=2)[0] for shard, size in enumerate(sizes)]
    in_threads(*(lambda s=s: s.publish(1, metadata=SAID) for s in shards))
    view = tensorhub.connect(server.address)
    assert [shard[0].shape for shard in view.layout("m").shards] == [(10,), (20,)]
    assert view.metadata("m") == SAID


def test_metadata_is_asked_of_whoever_has_the_version(server, join):
    trainer, array = join("t", 1.0)
    rollout, _ = join("r")
    view = tensorhub.connect(server.address)
    trainer.publish(1, metadata=SAID)
    rollout.replicate("latest")
    with trainer.mutating(version=2, metadata={"step": 8}):
        array += 1
    assert (view.metadata("m", 1), view.metadata("m", 2), view.metadata("m")) == (SAID, {"step": 8}, {"step": 8})
    trainer.close()
    rollout.update()
    with pytest.raises(tensorhub.VersionUnavailable):
        view.metadata("m", 1)


def test_metadata_of_a_copy_in_host_memory(server, join):
    trainer, _ = join("t", 1.0)
    trainer.publish(1, metadata=SAID)
    trainer.unpublish()
    assert tensorhub.connect(server.address).metadata("m") == SAID
    assert trainer.statistics()["sent_bytes"] == 0


def test_a_manifest_with_another_root_is_not_believed(server, join, monkeypatch):
    """Its holder lies, or has other content."""
    trainer, _ = join("t", 1.0)
    trainer.publish(1, metadata=SAID)
    describe = descriptions.wait_for_description

    async def otherwise(*arguments):
        found, layout = await describe(*arguments)
        return replace(found, root="0" * 32), layout

    monkeypatch.setattr(descriptions, "wait_for_description", otherwise)
    with pytest.raises(tensorhub.SourceLost, match="has shown the manifest of something else"):
        tensorhub.connect(server.address).metadata("m")


def test_who_serves_without_sockets_cannot_be_asked(server, join):
    trainer, _ = join("t", 1.0, transports="local")
    trainer.publish(1, metadata=SAID)
    view = tensorhub.connect(server.address)
    assert view.layout("m").version == 1
    with pytest.raises(tensorhub.SourceLost, match="nobody serves by tcp"):
        view.metadata("m")


def test_a_wrong_token_learns_nothing():
    running = tensorhub.serve(token="secret")
    with running as server, tensorhub.open("m", replica="t", server=server.address, token="secret") as trainer:
        trainer.register({"w": np.zeros(10)})
        trainer.publish(1, metadata=SAID)
        assert tensorhub.connect(server.address, token="secret").metadata("m") == SAID
        for ask in ("layout", "metadata"):
            with pytest.raises(tensorhub.Refused):
                getattr(tensorhub.connect(server.address), ask)("m")


def test_no_thread_and_no_connection_is_left(server, join):
    trainer, _ = join("t", 1.0)
    trainer.publish(1, metadata=SAID)
    view = tensorhub.connect(server.address)
    for _ in range(20):
        assert view.metadata("m") == SAID
    eventually(lambda: trainer.statistics()["transport"]["connections_open"] == 0, "no connection is left")
