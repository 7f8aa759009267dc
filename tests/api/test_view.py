"""`connect`: what there is, and what a version is made of, without being a worker."""

import contextlib
import socket
import threading

import numpy as np
import pytest
from msgspec.structs import replace

import tensorhub
from runtime.kit import eventually
from tensorhub import aio
from tensorhub.protocol.status import TensorView
from tensorhub.runtime import questions


def test_models_versions_and_replicas(server, join):
    trainer, array = join("t", 1.0, transports="local,tcp")
    join("r", model="other")
    trainer.publish(3)
    view = tensorhub.connect(server.address)
    assert view.models() == ["m", "other"]
    (version,) = view.versions("m")
    assert (version.version, version.is_latest, version.is_complete, version.holders) == (3, True, True, ("t",))
    (replica,) = view.replicas("m")
    assert (replica.name, replica.shards) == ("t", 1)
    (worker,) = replica.workers
    assert (worker.state, worker.version, worker.size_bytes) == ("holding", 3, array.nbytes)
    assert [endpoint.partition("://")[0] for endpoint in worker.endpoints] == ["local", "tcp"]
    assert worker.endpoints[1].startswith("tcp://127.0.0.1:")
    assert [model.name for model in view.status(model="other").models] == ["other"]


def test_a_worker_that_is_opened_when_its_caller_is_interrupted_does_not_live_on(server, interrupting, monkeypatch):
    with interrupting(aio.open_client) as open_client:
        monkeypatch.setattr(aio, "open_client", open_client)
        tensorhub.open("m", replica="t", server=server.address)
    monkeypatch.undo()
    tensorhub.open("m", replica="t", server=server.address).close()
    view = tensorhub.connect(server.address)
    eventually(lambda: not view.replicas("m"), "nobody is there")


def test_an_answer_without_an_end_is_not_kept(monkeypatch):
    """Whatever listens at that address, it takes no more memory than the longest answer of a server."""
    monkeypatch.setattr(questions, "MAX_ANSWER_BYTES", 1 << 20)
    piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    wire, _ = listener.accept()
                    with wire, contextlib.suppress(OSError):
                        wire.recv(4000)
                        wire.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                        while True:
                            wire.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(tensorhub.ServerUnreachable, match="its answer has more than 1048576 B"):
            tensorhub.connect(f"127.0.0.1:{listener.getsockname()[1]}", timeout=10).models()
        listener.shutdown(socket.SHUT_RDWR)


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


def test_a_manifest_with_another_root_is_not_believed(server, join, monkeypatch):
    """Its holder lies, or has other content."""
    trainer, _ = join("t", 1.0)
    trainer.publish(1, metadata=SAID)
    describe = questions.wait_for_description

    async def otherwise(*arguments):
        found, layout = await describe(*arguments)
        return replace(found, root="0" * 32), layout

    monkeypatch.setattr(questions, "wait_for_description", otherwise)
    with pytest.raises(tensorhub.SourceLost, match="has shown the manifest of something else"):
        tensorhub.connect(server.address).metadata("m")


def test_a_wrong_token_learns_nothing():
    running = tensorhub.serve(token="secret")
    with running as server, tensorhub.open("m", replica="t", server=server.address, token="secret") as trainer:
        trainer.register({"w": np.zeros(10)})
        trainer.publish(1, metadata=SAID)
        assert tensorhub.connect(server.address, token="secret").metadata("m") == SAID
        for ask in ("layout", "metadata"):
            with pytest.raises(tensorhub.Refused):
                getattr(tensorhub.connect(server.address), ask)("m")


# --- A model is begun anew: its numbers are forgotten where no worker holds a version.


def test_a_model_is_begun_anew_once_no_worker_holds_a_version_of_it(server, join):
    view = tensorhub.connect(server.address)
    with pytest.raises(tensorhub.VersionUnavailable, match="no model 'm' is known"):
        view.begin_anew("m")
    no_copies = {"reliable": False, "host_bytes": 0}
    idle, _ = join("idle", **no_copies)
    trainer, _ = join("t", 1.0, **no_copies)
    rollout, _ = join("r", **no_copies)
    trainer.publish(8)
    rollout.replicate()
    with pytest.raises(tensorhub.VersionConflict, match=r"newest is 8: by m/r\[0\], m/t\[0\]"):
        view.begin_anew("m")
    rollout.close()
    with pytest.raises(tensorhub.VersionConflict, match=r"by m/t\[0\]"):
        view.begin_anew("m")
    trainer.close()
    again, _ = join("t", 2.0, **no_copies)
    with pytest.raises(tensorhub.VersionConflict, match="lower than the newest, 8"):
        again.publish(1)
    view.begin_anew("m")
    assert view.next_version("m") == 0
    again.publish(1)
    assert idle.replicate() == 1
    with pytest.raises(tensorhub.VersionConflict, match="newest is 1"):
        view.begin_anew("m")


def test_a_model_with_a_writer_is_not_begun_anew(server, join):
    trainer, _ = join("t")
    trainer.publish(8)
    view = tensorhub.connect(server.address)
    with trainer.mutating(version=9), pytest.raises(tensorhub.VersionConflict, match="m"):
        view.begin_anew("m")
    assert trainer.version == 9


def test_a_restarted_server_does_not_hear_the_old_numbers_from_workers_that_knew_them(tmp_path):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(tensorhub.serve(lease_s=2, report_s=0.2, state=tmp_path / "journal"))
        idle, trainer, former = (
            stack.enter_context(tensorhub.open("m", replica=name, server=server.address, reliable=False, host_bytes=0))
            for name in ("idle", "t", "former")
        )
        for weights in (idle, trainer, former):
            weights.register({"w": np.ones(100, np.float32)})
        former.publish(8)
        trainer.replicate()
        trainer.unpublish()
        former.close()
        tensorhub.connect(server.address).begin_anew("m")
        port = int(server.address.rpartition(":")[2])
        server.close()
        kept = tmp_path / "journal"
        restarted = stack.enter_context(tensorhub.serve(port=port, lease_s=2, report_s=0.2, fresh=False, state=kept))
        assert tensorhub.connect(restarted.address).next_version("m") == 0
        assert trainer.publish(1) == 1
        assert idle.replicate() == 1
