"""`connect`: what there is, for people and scripts, without being a worker."""

import contextlib
import socket
import threading

import pytest

import tensorhub
from runtime.kit import eventually
from tensorhub import aio
from tensorhub.runtime import questions


def test_an_empty_server_has_nothing(server):
    view = tensorhub.connect(server.address)
    assert view.models() == []
    assert view.versions("m") == ()
    assert view.replicas("m") == ()
    assert view.transfers() == ()
    assert view.status().recovering_s == 0


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


def test_the_server_knows_itself_too(server, join):
    join("t", 1.0)
    assert [model.name for model in server.status().models] == ["m"]
    assert server.address in repr(server)


def test_settings_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("TENSORHUB_SERVER", server.address)
    assert tensorhub.connect().models() == []
    with tensorhub.open("m", replica="r"):
        assert tensorhub.connect().models() == ["m"]


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
