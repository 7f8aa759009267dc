"""The measuring processes of `tensorhub doctor`. Each may hang or die without harm.

    python -m tensorhub.cli.doctor_child source SCHEME SIZE    exports bytes, and says where; lives as long as stdin
    python -m tensorhub.cli.doctor_child reader SCHEME         reads what stdin names; says at what rates
    python -m tensorhub.cli.doctor_child device SIZE           copies and hashes on the first GPU
    python -m tensorhub.cli.doctor_child server ADDRESS        asks a reference server how it is

Each prints one line of JSON behind a mark, because libraries print too. Where something does not work, the answer has
`error`, and perhaps `hint`. `ways` are triples: a name in `doctor.WAYS`, its rate, and the rate of its limit.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..memory.digests import build_manifest
from ..memory.fill import FillSink
from ..memory.rates import Way, bare_copy, best, device_ways, for_device, on_device, on_host, on_host_mapped
from ..protocol.errors import TensorHubError
from ..protocol.names import Digest
from ..runtime.config import options_without_token, worker_options
from ..runtime.opening import make_transport
from ..transport.base import ByteStream, Export, Progress, Transport, read_to_end
from ..transport.nixl.probe import Probe
from ..transport.sealed import Unmappable
from .doctor import MARK

KEY, MAPPED_KEY = "doctor", "doctor-mapped"
READ_S = 10.0
PROBE_S = 12.0  # of NIXL: shorter than the doctor's deadline, so that the doctor learns why
ASK_S = 3.0


def _made(scheme: str) -> Transport:
    return make_transport(scheme, "127.0.0.1", worker_options(), probe_s=PROBE_S)


def source(scheme: str, size: str) -> None:
    """Export until stdin ends."""
    size_bytes, chunk_bytes = int(size), options_without_token().chunk_bytes
    transport = _made(scheme)
    exported = {KEY: on_device(for_device(size_bytes)) if scheme == "cuda" else on_host(size_bytes)}
    if scheme == "local":
        with suppress(Unmappable):  # the line `mapping memory` says why
            exported[MAPPED_KEY] = on_host_mapped(size_bytes)
    for key, mine in exported.items():
        manifest = build_manifest(mine, chunk_bytes)
        progress = Progress(manifest.chunk_count, complete=True)
        transport.export(Export(key, manifest.encode(), chunk_bytes, mine.stream, progress))
    roots = {key: manifest.root() for key in exported}  # all have the same bytes
    plain = _plain_source(exported[KEY].stream) if scheme == "tcp" else 0
    say(endpoint=transport.endpoint, size_bytes=exported[KEY].size_bytes, roots=roots, plain=plain)
    sys.stdin.read()


def _plain_source(stream: ByteStream) -> int:
    """Sends all bytes on each connection to this port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            wire, _ = listener.accept()
            with wire, suppress(OSError), stream.reading(0, stream.size_bytes) as views:
                for view in views:
                    wire.sendall(view)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def _read_plain(port: int, stream: ByteStream) -> None:
    address, size_bytes = ("127.0.0.1", port), stream.size_bytes
    with socket.create_connection(address, READ_S) as wire, stream.writing(0, size_bytes) as views:
        for view in views:
            while view and (got := wire.recv_into(view)):
                view = view[got:]


def reader(scheme: str) -> None:
    """Read what stdin names, beside what limits that."""
    told = json.loads(sys.stdin.readline())
    size_bytes, transport = told["size_bytes"], _made(scheme)
    why_not = transport.why_not(told["endpoint"])
    if why_not is not None:
        return say(error=why_not)
    mine, paths = on_device(size_bytes) if scheme == "cuda" else on_host(size_bytes), []

    def rate(key: str, *, is_verified: bool = True) -> float:
        def once() -> None:
            sink = FillSink(mine, Digest(told["roots"][key]), verify="full" if is_verified else "none")
            paths.append(read_to_end(transport, told["endpoint"], key, sink, within_s=READ_S))

        return best(once, size_bytes)

    found = rate(KEY)
    path = paths[-1]
    if isinstance(probed := getattr(transport, "probed", None), Probe):
        path += f"; NIXL {probed.version}"
    ways: list[Way] = []
    if scheme == "tcp":
        unverified, plain = (
            rate(KEY, is_verified=False),
            best(partial(_read_plain, told["plain"], mine.stream), size_bytes),
        )
        chunk_bytes = options_without_token().chunk_bytes
        hashed = best(lambda: build_manifest(mine, chunk_bytes, threads=1), size_bytes)
        ways = [
            ("tcp", found, unverified),
            ("tcp without digests", unverified, plain),
            ("host digest", hashed, bare_copy(mine)),
        ]
    elif scheme in ("local", "cuda"):
        ways = [(scheme, found, copy := bare_copy(mine))]
        if MAPPED_KEY in told["roots"]:
            ways.append(("local from mapped memory", rate(MAPPED_KEY), copy))
    say(rate_bytes_per_s=round(found), path=path, ways=ways)


def device(size: str) -> None:
    """What the first GPU does, beside bare copies on it and over its bus."""
    reason, ways = device_ways(int(size), options_without_token().chunk_bytes)
    say(error=reason) if reason else say(ways=ways)


def server(address: str) -> None:
    """Is it there, and does it talk to us?"""
    from .. import connect

    began = time.perf_counter()
    status = connect(address, timeout=ASK_S).status()
    took_ms = (time.perf_counter() - began) * 1e3
    workers = sum(len(replica.workers) for model in status.models for replica in model.replicas)
    say(protocol=status.protocol, uptime_s=status.uptime_s, workers=workers, took_ms=took_ms)


def say(**answer: object) -> None:
    """The one line, by itself also where a library has left one unfinished."""
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps(answer)}\n".encode())


def main(role: str, *arguments: str) -> None:
    """Do it, or say why not; leave at once, whatever threads are about."""
    roles: dict[str, Callable[..., None]] = {"source": source, "reader": reader, "device": device, "server": server}
    try:
        roles[role](*arguments)
    except TensorHubError as error:
        say(error=str(error), hint=error.hint or "")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
