"""The reference server towards strangers: each gets an answer or is hung up on, and nobody else notices."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import struct

import aiohttp
import numpy as np
import pytest

import tensorhub
from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.messages import MAX_LAYOUT_BYTES, MAX_REPORT_BYTES, PROTOCOL, Orders, Refusal, Report
from tensorhub.protocol.names import ModelName, Number, ReplicaName, Shard
from tensorhub.protocol.settings import Settings
from tensorhub.runtime import server as server_module
from tensorhub.runtime.connection import decode_to_worker, encode
from tensorhub.runtime.journal import JournalFile
from tensorhub.runtime.serving import ServerThread
from tensorhub.server.journal import Begun, Over

from .kit import PATIENCE_S, UPGRADE, eventually, hello, line_to, own_token, within

AIOHTTP = tuple(map(int, aiohttp.__version__.split(".")[:3]))


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


@pytest.fixture
def witness(server):
    """A worker that must not notice anything."""
    with tensorhub.open("witness", replica="w", server=server.address) as weights:
        array = np.zeros(10)
        weights.register({"w": array})
        yield weights
        before = weights.statistics()["connects"]
        with weights.mutating(version=1, timeout=5):
            array += 1
        assert (weights.version, before) == (1, 1)


async def hear(line) -> object:
    """The next message on a raw line, or how it was closed."""
    frame = await line.receive(timeout=5)
    return decode_to_worker(frame.data) if frame.type is aiohttp.WSMsgType.BINARY else frame.type


def conversation(address, *frames):
    """Send raw frames on one connection; everything that was heard until it ended."""

    async def talk():
        heard = []
        async with line_to(address) as line:
            for frame in frames:
                await (line.send_str(frame) if isinstance(frame, str) else line.send_bytes(frame))
            while True:
                heard.append(await hear(line))
                if not isinstance(heard[-1], Orders | Refusal):
                    return heard

    return asyncio.run(talk())


def test_a_hello_and_a_report_are_answered_with_orders(server):
    async def talk():
        async with line_to(server.address, hello(), Report(1)) as line:
            return await hear(line)

    orders = asyncio.run(talk())
    assert isinstance(orders, Orders)
    assert (orders.acknowledged, orders.lease_s, orders.report_s) == (1, 2.0, 0.2)
    assert orders.session > 0


BAD_CONVERSATIONS = {
    "garbage": [b"\xc1\x00\xff"],
    "nothing": [b""],
    "text": ["hello?"],
    "report before hello": [encode(Report(1))],
    "two hellos": [encode(hello()), encode(hello())],
    "a long first message": [b"\xc4" * (MAX_REPORT_BYTES + 1)],
    "a long report": [encode(hello()), encode(Report(1, received_bytes={f"r{i}": i for i in range(9000)}))],
    "a bad version to fetch ahead": [encode(hello()), encode(Report(1, prefetch="x"))],
    "prefetched to fetch ahead": [encode(hello()), encode(Report(1, prefetch="prefetched"))],
    "orders": [encode(Orders(1, 1, 1, 1.0, 1.0, 1.0))],
    "wrong protocol": [encode(hello()).replace(b"tensorhub/7", b"tensorhub/9")],
    "garbage after a hello": [encode(hello()), b"\xff\xff"],
}


def test_what_makes_no_sense_is_refused_for_good_and_hung_up_on(server, witness):
    for name, frames in BAD_CONVERSATIONS.items():
        *_, refusal, end = conversation(server.address, *frames)
        assert isinstance(refusal, Refusal), name
        assert refusal.code in ("refused", "usage"), name
        assert refusal.retry_s == 0, name
        assert end in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), name
    *_, refusal, end = conversation(server.address, encode(hello()), encode(Report(1, seen=2**63)))
    assert "a number out of range" in refusal.message
    assert refusal.retry_s > 0, "an odd number is no reason to give up for good"
    assert end in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


def test_a_frame_over_the_limit_ends_its_connection(server, witness):
    with within(8):
        try:
            heard = conversation(server.address, bytes(MAX_LAYOUT_BYTES + 1))
        except (ConnectionError, aiohttp.ClientError):  # cut before all of it was sent
            heard = [aiohttp.WSMsgType.CLOSED]
    assert heard[-1] in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


def test_random_frames(server, witness):
    """On as many connections as it takes: the server refuses each and goes on."""
    dice = random.Random(11)
    frames = [dice.randbytes(dice.randrange(1, 120)) for _ in range(1_000)]

    async def flood(share):
        async with line_to(server.address) as line:
            for frame in share:
                try:
                    await line.send_bytes(frame)
                except (ConnectionError, aiohttp.ClientError):
                    return

    async def all_of_it():
        for at in range(0, len(frames), 200):
            await asyncio.gather(*(flood(frames[i : i + 20]) for i in range(at, at + 200, 20)))

    asyncio.run(all_of_it())
    eventually(lambda: server.status().counters["connections"] == 1, "strangers are gone")


def test_bytes_that_are_no_http_or_no_frames(server, witness):
    dice = random.Random(13)
    for length in (0, 1, 10, 100, 10_000):
        with raw(server.address) as stranger:
            stranger.sendall(dice.randbytes(length) + b"\r\n\r\n")
    with raw(server.address) as stranger:  # reset in the middle of a request
        stranger.sendall(b"GET /v1/session HTTP/1.1\r\nUpgrade: webso")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with raw(server.address) as stranger:
        stranger.sendall(UPGRADE + dice.randbytes(5_000))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(65536):
                pass


def test_who_says_no_hello_is_cut(server, monkeypatch):
    monkeypatch.setattr(server_module, "HELLO_S", 0.1)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)

    async def talk():
        async with line_to(server.address) as line:
            return await line.receive(timeout=5)

    assert asyncio.run(talk()).type is not aiohttp.WSMsgType.BINARY


@pytest.mark.parametrize("given", [{"token": "s3cret"}, {}], ids=["given", "of the state directory"])
def test_a_server_without_a_token_refuses_who_has_one(given):
    """He believes that strangers are kept out."""
    own_token()
    with tensorhub.serve(insecure=True) as server:
        with pytest.raises(tensorhub.Refused, match="the server was started without one") as found:
            tensorhub.open("m", replica="r", server=server.address, **given)
        assert "insecure=True (TENSORHUB_INSECURE=1)" in found.value.hint
        with tensorhub.open("m", replica="r", server=server.address, insecure=True):
            assert tensorhub.connect(server.address, insecure=True).models() == ["m"]


def test_a_server_with_a_token_answers_nobody_without_it():
    with tensorhub.serve(token="s3cret") as server:
        *_, refusal, _ = conversation(server.address, encode(hello(token="guess")))
        assert (refusal.code, refusal.retry_s) == ("refused", 0)
        with pytest.raises(tensorhub.Refused):
            tensorhub.open("m", replica="r", server=server.address)
        with pytest.raises(tensorhub.Refused):
            tensorhub.connect(server.address).models()
        for wrong, said in (("guess", "has another token"), (None, "wants a token, and none was given")):
            shown = {"insecure": True} if wrong is None else {"token": wrong}
            with pytest.raises(tensorhub.Refused, match=said) as found:
                tensorhub.connect(server.address, **shown).models()
            assert "tensorhub/token" in found.value.hint
            with pytest.raises(tensorhub.Refused, match=said) as found:
                tensorhub.open("m", replica="r", server=server.address, **shown)
            assert "tensorhub/token" in found.value.hint
        with tensorhub.open("m", replica="r", server=server.address, token="s3cret") as weights:
            assert tensorhub.connect(server.address, token="s3cret").models() == ["m"]
            with pytest.raises(tensorhub.DeadlineExceeded):
                weights.wait_for("latest", timeout=0.1)
        status, said = get(server.address, "/healthz")
        assert status == 200
        assert json.loads(said) == {"status": "ok", "protocol": PROTOCOL}


@pytest.mark.parametrize("fate", ["whole", "torn", "gone"])
def test_a_restarted_server_goes_on_at_once_where_its_journal_names_all_workers(fate, tmp_path):
    """Else any worker may still live, and it listens for a lease."""
    journal = tmp_path / "journal"
    server = tensorhub.serve(lease_s=600, state=journal)
    port = int(server.address.rpartition(":")[2])
    with tensorhub.open("m", replica="t", server=server.address) as trainer:
        trainer.register({"w": np.ones(1000)})
        assert trainer.publish(1) == 1
        server.close()
        if fate == "torn":
            journal.write_bytes(journal.read_bytes()[:-3])
        elif fate == "gone":
            journal.unlink()
        with tensorhub.serve(port=port, lease_s=600, fresh=False, state=journal) as server:
            if fate == "whole":
                with trainer.mutating(version=2, timeout=60):
                    pass
                assert server.status().recovering_s == 0
            else:
                with (
                    pytest.raises(tensorhub.DeadlineExceeded, match="listens for"),
                    trainer.mutating(version=2, timeout=1),
                ):
                    pytest.fail("the block ran")
                assert server.status().recovering_s > 500
            trainer.close(timeout=1)


def test_a_journal_belongs_to_one_server_at_a_time(tmp_path):
    with (
        tensorhub.serve(state=tmp_path / "journal"),
        pytest.raises(UsageError, match="another server uses the journal"),
    ):
        tensorhub.serve(state=tmp_path / "journal")


def test_a_server_goes_on_without_a_journal_that_cannot_be_written(tmp_path, caplog):
    journal = JournalFile(tmp_path / "journal")
    journal.write([Begun(1, Number(1), "")], is_whole=True)
    os.close(journal._file)
    journal._file = os.open(tmp_path / "journal", os.O_RDONLY)
    journal.write([Over(ModelName("m"), ReplicaName("r"), Shard(0), Number(2))], is_whole=False)
    assert "a restart of this server will wait for a lease" in caplog.text
    assert not (tmp_path / "journal").exists()
    journal.close()


def test_a_copied_journal_is_the_same_and_tells_not_which_workers_live(tmp_path):
    """Also when the first one begins it anew meanwhile."""
    first, copy = JournalFile(tmp_path / "journal"), JournalFile(tmp_path / "copy")
    over = Over(ModelName("m"), ReplicaName("r"), Shard(0), Number(2))
    part, length = "", 0
    for record, is_whole, is_copied_whole in ((None, True, True), (over, False, False), (None, True, True)):
        first.write([record or Begun(1, Number(length), first.boot)], is_whole=is_whole)
        now, begins, data = first.since(part, length)
        assert (begins == 0) == is_copied_whole
        copy.copy(data, is_whole=begins == 0)
        part, length = now, begins + len(data)
        assert copy.path.read_bytes() == first.path.read_bytes()
        assert first.since(part, length) == (part, length, b"")
    assert first.since(part, length + 1)[1] == 0, "it does not have so much"
    histories = [each.history(max_versions=9) for each in (first, copy)]
    assert [each.is_whole for each in histories if each is not None] == [bool(first.boot), False]
    first.close()
    copy.close()


def test_the_journal_is_for_those_who_show_the_token(tmp_path):
    with tensorhub.serve(token="s3cret", state=tmp_path / "journal") as server:
        assert get(server.address, "/v1/journal", Authorization="")[0] == 401
        status, data = get(server.address, "/v1/journal", Authorization="Bearer s3cret")
        assert (status, data) == (200, (tmp_path / "journal").read_bytes())
        assert get(server.address, "/v1/journal?offset=x", Authorization="Bearer s3cret")[0] == 400
        assert get(server.address, "/v1/journal?life=1", Authorization="Bearer s3cret") == (200, b"")
    with tensorhub.serve(token="s3cret") as server:
        assert get(server.address, "/v1/journal", Authorization="Bearer s3cret")[0] == 404


def test_no_server_starts_with_a_token_that_no_client_can_give():
    """HTTP takes blanks off the ends: then workers could join, and nobody could ask how they are."""
    for token in ("s3cret ", " s3cret", "s3\tcret", "s3cret\n", b"s3cret"):
        for start in (tensorhub.serve, ServerThread):
            with pytest.raises(UsageError, match="token") as found:
                start(token=token)
            assert "cret" not in f"{found.value} {found.value.hint}"
    token = "s3 cret, gehüllt, 秘密"  # it may be given
    with tensorhub.serve(token=token) as server:
        with tensorhub.open("m", replica="r", server=server.address, token=token):
            assert tensorhub.connect(server.address, token=token).models() == ["m"]
        assert get(server.address, "/v1/status", Authorization="Bearer \udcff")[0] == 401, "bytes that are no text"


def raw(address):
    """A bare connection to the server."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def get(address, path, **headers):
    headers = {"Authorization": f"Bearer {own_token()}"} | headers

    async def ask():
        async with aiohttp.ClientSession() as http, http.get(f"http://{address}{path}", headers=headers) as answer:
            return answer.status, await answer.read()

    return asyncio.run(ask())


def test_strangers_do_not_fill_the_log(server, witness, caplog):
    """aiohttp before 3.14.4 takes the last address for a defect of its own, and just closes the connection.

    Before 3.14 it wants no Host, and there is nothing at "/".
    """
    for said in [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ] * 5:
        with raw(server.address) as stranger:
            stranger.sendall(said)
            answer = stranger.recv(100)
            assert b" 40" in answer or (AIOHTTP < (3, 14, 4) and said.startswith(b"GET http") and not answer)
    (record,) = caplog.records
    assert "it is no HTTP" in record.getMessage()
    assert not record.exc_info


HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
GARBLED = {
    "gzip": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!",
    "deflate": HEAD + b"Content-Encoding: deflate\r\nContent-Length: 4\r\n\r\n\xff\xff\xff\xff",
    "gzip in chunks": HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "length": HEAD + b"Content-Length: -4\r\n\r\n",
    "upgrade": HEAD
    + b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx",
}


def test_a_body_that_makes_no_sense_is_a_bad_request_and_no_traceback(server, caplog):
    for name, said in GARBLED.items():
        with raw(server.address) as stranger:
            stranger.sendall(said)
            assert b" 400 " in stranger.recv(100), name
            while stranger.recv(4096):  # until it is hung up on
                pass
    eventually(lambda: not server._server._runner.server.connections, "the connections have ended")
    assert not any(record.exc_info for record in caplog.records)


def test_status_is_json_and_questions_that_make_no_sense_are_bad_requests(server, witness):
    status, body = get(server.address, "/v1/status")
    seen = json.loads(body)
    assert status == 200
    assert seen["protocol"] == "tensorhub/7"
    assert [model["name"] for model in seen["models"]] == ["witness"]
    assert json.loads(get(server.address, "/v1/status?model=other")[1])["models"] == []
    assert get(server.address, "/v1/wait")[0] == 400
    assert get(server.address, "/v1/wait?model=m&spec=newest")[0] == 400
    assert get(server.address, "/v1/wait?model=m&spec=1&timeout=long")[0] == 400
    assert get(server.address, "/nowhere")[0] == 404
    assert get(server.address, "/v1/session")[0] == 400
    assert json.loads(get(server.address, "/v1/wait?model=m&spec=1&timeout=0.05")[1]) == {"version": None}


def test_a_port_that_is_taken_is_a_clear_error(server):
    host, port = server.address.split(":")
    with pytest.raises(UsageError, match=f"cannot listen on {host}:{port}.*in use"):
        ServerThread(host, int(port))
    for host in ("203.0.113.1", "no-such-name.invalid"):
        with pytest.raises(
            UsageError, match=f"cannot listen on {host}:0: this machine does not have that address"
        ) as raised:
            ServerThread(host, 0)
        assert "0.0.0.0" in str(raised.value.hint)
    for port in (70_000, -1, "x", 80.0, True):
        with pytest.raises(UsageError, match=f"port={port!r} is not an integer from 0 to 65535"):
            tensorhub.serve(port=port)
    with pytest.raises(UsageError, match="host is no printable text"):
        tensorhub.serve(host=5)


def test_addresses_of_ipv6_and_all_interfaces(monkeypatch):
    with tensorhub.serve("::1") as first:
        assert tensorhub.connect(first.address).models() == []
        with pytest.raises(UsageError) as raised:
            tensorhub.serve("::1", int(first.address.rpartition(":")[2]))
        assert f"`tensorhub status --server {first.address}`" in str(raised.value.hint)
    for host in ("[::]", ""):
        with tensorhub.serve(host) as running:
            port = running.address.rpartition(":")[2]
            for address in ("127.0.0.1", "[::1]"):
                assert tensorhub.connect(f"{address}:{port}").status().protocol == PROTOCOL
            with pytest.raises(tensorhub.UsageError, match="that port is in use"):
                tensorhub.serve(host, port=int(port))
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with pytest.raises(tensorhub.UsageError, match="IPv6 is switched off on this machine") as raised:
        tensorhub.serve("::")
    assert "0.0.0.0" in raised.value.hint
    with tensorhub.serve("") as running:
        assert tensorhub.connect(running.address).status().protocol == PROTOCOL


def test_a_server_that_is_full_is_not_said_to_be_missing(monkeypatch, caplog):
    monkeypatch.setattr(server_module, "SPARE_CONNECTIONS", 0)
    with ServerThread(settings=Settings(max_workers=1)) as server:
        with (
            tensorhub.open("m", replica="first", server=server.address),
            pytest.raises(tensorhub.ServerUnreachable) as raised,
        ):
            tensorhub.open("m", replica="second", server=server.address, timeout=0.5)
        said = f"the reference server at {server.address} let no client in"
        within = re.escape(f"m/second[0]: {said} within ") + r"0\.[45] s: it is full of connections"
        assert re.fullmatch(within, str(raised.value)), "it gives up when no further try would be in time"
        assert "TENSORHUB_MAX_WORKERS" in raised.value.hint
        assert f"{said}: it is full of connections" in caplog.text


def test_a_server_that_stops_is_not_said_to_be_full():
    with ServerThread() as server:
        server._server.shell._is_stopping = True
        assert get(server.address, "/v1/session")[0] == 503
        with pytest.raises(tensorhub.ServerUnreachable) as raised:
            tensorhub.open("m", replica="r", server=server.address, timeout=0.5)
    said = re.escape(f"m/r[0]: the reference server at {server.address} let no client in within ")
    assert re.fullmatch(said + r"0\.[45] s: it is stopping", str(raised.value))


def test_a_closed_server_says_so_and_frees_its_port_and_closing_twice_is_fine():
    first = tensorhub.serve()
    host, port = first.address.split(":")
    first.close()
    first.close()
    with pytest.raises(tensorhub.Closed, match=f"reference server at {first.address}"):
        first.status()
    with tensorhub.serve(host, int(port)) as second:
        assert second.address == first.address
