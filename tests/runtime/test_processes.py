"""Servers and workers in processes of their own: restart, silence, signals, fork, and an exit without a goodbye."""

import contextlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import tensorhub

from .kit import ServerProcess, eventually, within

pytestmark = pytest.mark.processes


@pytest.fixture
def server():
    with ServerProcess() as running:
        yield running


def worker(server, replica, value=0.0, size=100_000, **options):
    weights = tensorhub.open("m", replica=replica, server=server.address, **options)
    array = np.full(size, value, dtype=np.float32)
    weights.register({"w": array})
    return weights, array


def test_sigterm_and_sigint_end_a_server_in_order():
    for number in (signal.SIGTERM, signal.SIGINT):
        with ServerProcess() as server:
            weights, _ = worker(server, "t")
            server.send(number)
            assert server.process.wait(10) == 0
            weights.close(timeout=1)


SERVES = """
import signal, sys, tensorhub
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with tensorhub.serve() as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


def test_peers_that_leave_do_not_end_a_program_that_serves_with_sigpipe_at_its_default():
    """They ask much, end their half and go without having read: what is still written to them then is a broken pipe."""
    process = subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        host, port = process.stdout.readline().strip().split(":")
        with contextlib.suppress(ConnectionError):  # it has ended
            for _ in range(50):
                with socket.create_connection((host, int(port)), timeout=30) as peer:
                    peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
                    peer.recv(1, socket.MSG_PEEK)
                    peer.shutdown(socket.SHUT_WR)
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_server_that_stands_still_is_named_as_the_reason_and_not_left(server, monkeypatch):
    monkeypatch.setattr("tensorhub.runtime.connection.SILENCE_S", 0.5)
    trainer, _ = worker(server, "t", 1.0)
    server.send(signal.SIGSTOP)
    with within(4), pytest.raises(tensorhub.DeadlineExceeded, match=r"has not answered for [23][.0-9]* s"):
        trainer.publish(1, timeout=3)
    for call in (
        lambda: tensorhub.connect(server.address, timeout=0.5).models(),
        lambda: tensorhub.open("m", replica="x", server=server.address, timeout=0.5),
    ):
        with within(1.5), pytest.raises(tensorhub.Unavailable):
            call()
    server.send(signal.SIGCONT)
    assert trainer.publish(1, timeout=5) == 1
    assert trainer.statistics()["connects"] == 1
    trainer.close(timeout=5)


@pytest.mark.long
def test_a_server_that_stands_still_for_too_long_is_left(server, monkeypatch):
    monkeypatch.setattr("tensorhub.runtime.connection.SILENCE_S", 0.5)
    monkeypatch.setattr("tensorhub.runtime.connection.PATIENCE_S", 1.0)
    monkeypatch.setattr("tensorhub.runtime.connection.CONNECT_S", 0.5)
    trainer, _ = worker(server, "t", 1.0)
    server.send(signal.SIGSTOP)
    eventually(lambda: not trainer.statistics()["is_connected"], "the line is given up")
    with pytest.raises(tensorhub.DeadlineExceeded, match="does not answer"):
        trainer.publish(1, timeout=0.5)
    server.send(signal.SIGCONT)
    eventually(lambda: trainer.statistics()["is_connected"], "the line is back")
    assert trainer.publish(1, timeout=5) == 1
    trainer.close(timeout=5)


CHILD = """
import sys, time
import numpy as np
import tensorhub
address, what = sys.argv[1:]
weights = tensorhub.open("m", replica="child", server=address)
weights.register({"w": np.ones(1000)})
weights.publish(1)
"""


def run_child(server, rest, *, what=""):
    return subprocess.run(
        [sys.executable, "-c", CHILD + rest, server.address, what], capture_output=True, text=True, timeout=60
    )


def replicas(server):
    return [replica.name for replica in tensorhub.connect(server.address).replicas("m")]


def test_an_exit_without_close_neither_hangs_nor_leaves_a_ghost():
    with ServerProcess(lease_s=60, report_s=1) as patient:
        with within(20):  # most of it is the start of Python, beside busy processes; a hang has no end
            ended = run_child(patient, "")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert replicas(patient) == []


def test_an_interrupt_ends_a_waiting_call_at_once_and_the_next_one_works(server):
    rest = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background was told to ignore it
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    weights.wait_for(99, timeout=60)
except KeyboardInterrupt:
    pass
weights.unpublish(timeout=5)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    weights.replicate("latest-1", timeout=60)  # there is only one version
except KeyboardInterrupt:
    print("interrupted twice", time.monotonic() - began < 5)
print("published", weights.publish(2, timeout=5))
weights.close()
"""
    ended = run_child(server, rest)
    assert ended.stdout.split("\n")[:2] == ["interrupted twice True", "published 2"], ended.stderr


@pytest.mark.long
def test_sigterm_leaves_within_its_grace_and_the_heir_has_the_version(server):
    rest = """
tensorhub.leave_on_sigterm(10)
print("up", flush=True)
time.sleep(60)
"""
    with tensorhub.open("m", replica="heir", server=server.address, timeout=10) as heir:
        heir.register({"w": np.zeros(1000)})
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD + rest, server.address, ""], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            assert any(line == "up\n" for line in process.stdout)
            process.terminate()
            assert process.wait(15) == -signal.SIGTERM
        assert heir.replicate("latest", timeout=10) == 1  # out of its own host memory


@pytest.mark.long
def test_who_waits_for_a_busy_server_stands_in_its_queue_once(monkeypatch):
    """Its kernel has answered, its process has not: to hang up and come back would leave it lines that nobody wants."""
    monkeypatch.setattr("tensorhub.runtime.connection.CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as queue:
        address = f"127.0.0.1:{queue.getsockname()[1]}"
        with within(4), pytest.raises(tensorhub.ServerUnreachable, match="it does not answer"):
            tensorhub.open("m", replica="x", server=address, timeout=2)
        queue.setblocking(False)
        in_queue = []
        with contextlib.suppress(BlockingIOError):
            while True:
                in_queue.append(queue.accept()[0])
        assert len(in_queue) == 1
        in_queue[0].close()
