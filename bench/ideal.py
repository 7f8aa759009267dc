"""A stand-in for the reference server that decides nothing: the bound for what sockets and messages alone cost.

It answers each report at once, in the task that has read it, with orders that this report alone determines: a session
(a number); a call is resolved to the version that it names or to the highest that was published, and is finished when
the caller's own buffer shows so; whoever wants a version gets a grant on the publisher, whoever withdraws is drained.
It sends nothing unasked, keeps nothing but the highest version and a counter, and knows no lease, no group, no death.
"""

import asyncio
import signal
import sys

from aiohttp import WSMsgType, web

from tensorhub.protocol.messages import (
    MAX_LAYOUT_BYTES,
    Answer,
    Empty,
    Grant,
    Hello,
    Holding,
    LayoutInfo,
    Orders,
    Report,
    Source,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.connection import decode_to_server, encode

from .serve import die_with_parent


class Ideal:
    """What it knows: numbers, and the newest version with who published it."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.number = 1_000_000
        self.latest = Version(1)
        self.publisher: WorkerId | None = None
        self.roots: dict[tuple[int, int], Digest] = {}

    def _next(self) -> Number:
        self.number += 1
        return Number(self.number)

    def answer(self, hello: Hello, report: Report, state: dict[str, Grant | Number]) -> Orders:
        """Orders for one report. `state` is its line's: the session, and the grant that was given last."""
        session = state.setdefault("session", self._next())
        reported, buffer, grant = report.call, report.buffer, None
        answer, drained = None, None
        if reported is not None:
            answer = self._resolve(hello, report)
            version = answer.version
            if version is not None and not answer.finished and reported.verb == "update":
                grant = state.get("grant")
                if not isinstance(grant, Grant) or grant.version != version:
                    grant = state["grant"] = self._grant(hello, version)
        if isinstance(buffer, Withdrawing):
            drained = buffer.version
        return Orders(
            number=self._next(),
            session=session,  # type: ignore[arg-type]
            acknowledged=report.number,
            lease_s=self.settings.lease_s,
            trust_s=self.settings.trust_s,
            report_s=self.settings.report_s,
            position=report.ended,
            answer=answer,
            grant=grant if isinstance(grant, Grant) else None,
            drained=drained,
            newest=self.latest,
        )

    def _resolve(self, hello: Hello, report: Report) -> Answer:
        reported, buffer = report.call, report.buffer
        assert reported is not None
        if reported.verb == "unpublish":
            return Answer(reported.number, None, isinstance(buffer, Vacated | Empty))
        version = reported.resolved if reported.resolved is not None else self.latest
        if reported.verb == "publish":
            version = Version(int(reported.spec))
        is_held = isinstance(buffer, Holding) and buffer.version == version
        if is_held and reported.verb == "publish":
            self.latest, self.publisher = max(self.latest, version), hello.worker
            self.roots[(version, hello.shard)] = reported.root
        return Answer(reported.number, version, is_held)

    def _grant(self, hello: Hello, version: Version) -> Grant:
        publisher = self.publisher or hello.worker
        worker = WorkerId(publisher.model, publisher.replica, hello.shard)
        root = self.roots.get((version, hello.shard), Digest(""))
        where = Source(worker, False, ("tcp://10.0.0.1:1",), root)
        return Grant(Ticket(self._next()), version, (where,), "the publisher has it")

    async def session(self, request: web.Request) -> web.StreamResponse:
        """One worker's line."""
        socket = web.WebSocketResponse(max_msg_size=MAX_LAYOUT_BYTES, compress=False)
        await socket.prepare(request)
        hello: Hello | None = None
        state: dict[str, Grant | Number] = {}
        async for frame in socket:
            if frame.type is not WSMsgType.BINARY:
                continue
            match decode_to_server(frame.data):
                case Hello() as hello:
                    pass
                case LayoutInfo():
                    pass
                case Report() as report:
                    assert hello is not None
                    await socket.send_bytes(encode(self.answer(hello, report, state)))
        return socket


async def serve() -> None:
    """Until SIGTERM."""
    application = web.Application()
    application.router.add_get("/v1/session", Ideal().session)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"reference server at 127.0.0.1:{runner.addresses[0][1]}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    """On the loop that the product takes too."""
    die_with_parent()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    sys.exit(main())
