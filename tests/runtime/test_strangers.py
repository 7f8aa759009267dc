"""What a stranger may make the reference server hold: a little, of all together not much, and nothing once gone."""

import asyncio
import contextlib
import socket
import struct
import weakref
from math import inf
from pathlib import Path

import pytest

import tensorhub
from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import MAX_LAYOUT_BYTES, LayoutInfo, LayoutWanted, Orders, Refusal, Report
from tensorhub.protocol.settings import Settings
from tensorhub.runtime import admission
from tensorhub.runtime import server as server_module
from tensorhub.runtime.codec import decode_to_worker, encode
from tensorhub.runtime.serving import ServerThread

from .kit import ServerProcess, eventually, hello
from .test_lines import settle

UPGRADE = (
    b"GET /v1/session HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
ASK = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
MASK = bytes(4)  # it changes nothing
DEADLINE_S = 60.0


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=120) as running:
        yield running


def beginning(length: int) -> bytes:
    """How a binary frame of this length begins."""
    return struct.pack("!BBQ", 0x82, 0xFF, length) + MASK


def frame(message: object) -> bytes:
    data = encode(message)
    return beginning(len(data)) + data


class Raw:
    """A connection on which a client says what it likes, byte for byte."""

    def __init__(self, address: str, first: bytes = b"") -> None:
        host, port = address.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self.sock.sendall(UPGRADE + first)
        self.words = self.sock.makefile("rb")
        self.status = self.words.readline()
        while self.words.readline().strip():
            pass

    def hear(self) -> object:
        """The next message; None at the end."""
        with contextlib.suppress(ConnectionError):
            kind, length = self.words.read(2) or (0, 0)
            if length >= 126:
                (length,) = struct.unpack("!H" if length == 126 else "!Q", self.words.read(2 if length == 126 else 8))
            return decode_to_worker(self.words.read(length)) if kind == 0x82 else None
        return None

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.words.close()
        self.sock.close()


def test_who_begins_a_long_frame_is_refused_before_it_is_whole(server):
    with Raw(server.address) as stranger:
        stranger.sock.sendall(beginning(8 << 20) + bytes(admission.MAX_OF_ONE_BYTES))
        refusal = stranger.hear()
        assert isinstance(refusal, Refusal)
        assert "too much before any Hello" in refusal.message
        assert stranger.hear() is None


def test_many_short_frames_are_too_much_as_well(server):
    with Raw(server.address) as stranger:
        part = struct.pack("!BBH", 0x02, 0xFE, 1000) + MASK + bytes(1000)  # of a message that has no end
        stranger.sock.sendall(part + b"".join(b"\x00" + part[1:] for _ in range(69)))
        assert isinstance(stranger.hear(), Refusal)


def test_what_comes_with_the_request_counts(server):
    with Raw(server.address, first=beginning(8 << 20) + bytes(admission.MAX_OF_ONE_BYTES)) as stranger:
        if b" 101 " in stranger.status:  # it came in two
            assert isinstance(stranger.hear(), Refusal)
        else:  # up to 3.14.3 aiohttp has closed the connection before it can answer
            assert not stranger.status or b" 413 " in stranger.status


def test_who_is_welcome_may_say_as_much_as_a_layout_takes_without_a_pause(server):
    """It does not wait to be heard: all of it is on its way at once."""
    names = (f"{index}" + "x" * 4000 for index in range(4000))
    tensors = tuple(TensorSpec(name, "uint8", (16,), (1,), 16 * index, 16) for index, name in enumerate(names))
    layout = LayoutInfo.of(Layout(tensors, 16 * len(tensors)))
    assert 15 << 20 < len(encode(layout)) < MAX_LAYOUT_BYTES
    with Raw(server.address) as worker:
        worker.sock.sendall(frame(hello()) + frame(layout) + frame(Report(1, layout=layout.digest())))
        while not (isinstance(said := worker.hear(), Orders) and said.acknowledged == 1):
            assert isinstance(said, Orders | LayoutWanted)


def test_all_strangers_together_have_a_limit_that_no_worker_meets(server, monkeypatch):
    most = server._server.shell._strangers
    with Raw(server.address) as first, Raw(server.address) as second:
        first.sock.sendall(beginning(1 << 20) + bytes(40_000))
        eventually(lambda: most.held_bytes >= 40_000, "the first one is heard")
        monkeypatch.setattr(admission, "MAX_OF_ALL_BYTES", 30_000)
        second.sock.sendall(beginning(1 << 20) + bytes(20_000))
        assert second.hear() is None
        eventually(lambda: most.held_bytes < 50_000, "what the second one said is forgotten")
        with tensorhub.open("m", replica="r", server=server.address):
            assert tensorhub.connect(server.address).models() == ["m"]
        assert most.held_bytes >= 40_000, "the first one is still there"
    eventually(lambda: most.held_bytes == 0, "nothing is held of those who have gone")


@pytest.mark.parametrize("asks", [b"", ASK, UPGRADE], ids=["nothing", "a question", "a line"])
def test_idle_strangers_do_not_use_up_the_descriptors(server, monkeypatch, asks):
    """One that says nothing has 5 s else, and one that has asked once 75 s."""
    monkeypatch.setattr(admission, "_lowest_free", lambda: inf)  # none is left, whatever is closed
    monkeypatch.setattr(server_module, "HELLO_S", 2 * DEADLINE_S)
    host, port = server.address.split(":")
    with tensorhub.open("m", replica="r", server=server.address) as weights:
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(asks)
            with contextlib.suppress(ConnectionError):
                while stranger.recv(4096):
                    pass
        assert weights.statistics()["connects"] == 1, "a worker stays"


def test_lines_on_which_no_hello_was_said_keep_no_worker_out(monkeypatch):
    monkeypatch.setattr(server_module, "SPARE_CONNECTIONS", 1)
    monkeypatch.setattr(server_module, "HELLO_S", 2 * DEADLINE_S)
    with (
        ServerThread(settings=Settings(most_workers=1)) as server,
        Raw(server.address) as first,
        Raw(server.address),
        tensorhub.open("m", replica="r", server=server.address),
    ):
        assert first.hear() is None, "the oldest one was cut"


class Wire:
    """A transport, and aiohttp behind it: it keeps what it hears, and wakes `on_heard` as it does a reader."""

    def __init__(self) -> None:
        self.heard, self.is_paused, self.on_heard = b"", False, lambda: None
        self.protocol = self.transport = self  # of the request

    def set_protocol(self, protocol: object) -> None:
        self.hears = protocol

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def data_received(self, data: bytes) -> None:
        self.heard += data
        asyncio.get_running_loop().call_soon(self.on_heard)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_hello_is_heard_before_what_came_after_it_is_too_much(is_good):
    async def story() -> None:
        wire, refused = Wire(), []
        all_of_them = admission.Strangers()
        stranger = admission.Stranger(all_of_them, wire, lambda: refused.append(len(wire.heard)))
        said = bytes(range(250)) * 1000
        wire.on_heard = stranger.leave if is_good else lambda: None
        wire.hears.data_received(said)
        assert (wire.is_paused, len(wire.heard)) == (True, admission.MAX_OF_ONE_BYTES)
        await settle()
        assert not wire.is_paused
        wire.hears.data_received(b"more")
        if is_good:
            assert (wire.heard, refused, all_of_them.held_bytes) == (said + b"more", [], 0)
        else:
            assert wire.heard == said[: admission.MAX_OF_ONE_BYTES]
            assert (refused, all_of_them.held_bytes) == ([len(wire.heard)], len(wire.heard))

    asyncio.run(story())


GOODBYES = {
    "half a frame": beginning(1000) + bytes(500),
    "too much": beginning(8 << 20) + bytes(200_000),
    "no frame": b"\xff" * 500,
    "no message": beginning(5) + bytes(5),
    "a worker": frame(hello()) + beginning(8 << 20) + bytes(200_000),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("said", GOODBYES.values(), ids=GOODBYES)
def test_nothing_is_kept_of_who_has_gone(server, said):
    """Not in a circle either: a server looks for those seldom."""
    lines = server._server.shell._lines
    with Raw(server.address) as stranger:
        eventually(lambda: lines, "it is connected")
        kept = [weakref.ref(line.socket) for line in list(lines.values())]
        with contextlib.suppress(ConnectionError):  # it was hung up on
            stranger.sock.sendall(said)
    eventually(lambda: all(each() is None for each in kept), "it is forgotten")


@pytest.mark.processes
def test_memory_does_not_grow_with_strangers_that_come_and_go():
    with ServerProcess() as server:
        status = Path(f"/proc/{server.process.pid}/status")

        def memory_mib(which: str) -> int:
            return int(status.read_text().split(f"{which}:")[1].split()[0]) // 1024

        before_mib = memory_mib("VmRSS")
        for _ in range(6):
            with contextlib.ExitStack() as all_of_them:
                for stranger in [all_of_them.enter_context(Raw(server.address)) for _ in range(4)]:
                    with contextlib.suppress(ConnectionError):  # it was hung up on
                        stranger.sock.sendall(beginning(8 << 20) + bytes((8 << 20) - 1))
            tensorhub.connect(server.address).models()
        assert memory_mib("VmHWM") - before_mib < 24
