"""Well-formed nonsense: whatever passes the codec, the machine takes in, answers, and can show."""

import random

import msgspec
import pytest

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import (
    MAX_TEXT,
    PROTOCOL,
    CallReport,
    Empty,
    Filling,
    Hello,
    Holding,
    LayoutInfo,
    Poisoned,
    Reading,
    Report,
    TicketFailure,
    Withdrawing,
)
from tensorhub.protocol.names import worker_id
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.codec import Malformed, decode_to_server, encode
from tensorhub.server import Server

from .kit import hello

NONSENSE = {
    "a negative number": Report(-1),
    "a huge number": Report(2**63 - 1),
    "a negative version held": Report(1, buffer=Holding(-1, "ab")),
    "a huge version withdrawn": Report(1, buffer=Withdrawing(2**63, "ab")),
    "negative progress": Report(1, buffer=Filling(1, -1, 2)),
    "negative bytes": Report(1, received_bytes={"t": -1}),
    "a verb of another world": Report(1, call=CallReport(1, "destroy", "latest")),
    "a spec that names nothing": Report(1, call=CallReport(1, "update", "newest")),
    "publish of no number": Report(1, call=CallReport(1, "publish", "latest")),
    "publish of a negative number": Report(1, call=CallReport(1, "publish", -3)),
    "unpublish of a version": Report(1, call=CallReport(1, "unpublish", "latest")),
    "a claim that is no unpublish's": Report(1, call=CallReport(1, "update", "latest", claim=3)),
    "a negative claim": Report(1, call=CallReport(1, "unpublish", "", claim=-3)),
    "a huge claim": Report(1, claim=2**63),
    "a negative position": Report(1, call=CallReport(-1, "update", "latest")),
    "a read of a negative shard": Report(1, reading=Reading(5, worker_id("m", "t", -1), 1)),
    "a long story": Report(1, failures=(TicketFailure(1, worker_id("m", "t", 0), "x", "y" * (MAX_TEXT + 1)),)),
    "many failures": Report(1, failures=(TicketFailure(1, worker_id("m", "t", 0), "x", "y"),) * 5),
    "many endpoints": Hello(PROTOCOL, "m", "r", 0, 1, "life", endpoints=("tcp://x:1",) * 100),
    "a long life": Hello(PROTOCOL, "m", "r", 0, 1, "life" * 1000),
    "a call that there is none of": Report(1, call=CallReport(1, "choose", "latest")),
    "a huge floor": Report(1, call=CallReport(1, "update", "latest", floor=2**63)),
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
def test_what_no_worker_could_mean_is_malformed(message):
    with pytest.raises(Malformed):
        decode_to_server(encode(message))


class Liar:
    """Says anything that the protocol has words for."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def number(self) -> int:
        choice = self.dice.choice
        return choice([0, 1, 10**6, 2**62]) if self.dice.random() < 0.1 else self.dice.randrange(6)

    def word(self) -> str:
        return self.dice.choice(["", "a", "latest", "latest-1", "x" * 300, "\\", "publish", "é"])

    def digest(self) -> str:
        return self.dice.choice(["", "d1", "d2"])

    def worker(self):
        return worker_id(self.dice.choice("mk"), self.dice.choice("abc"), self.dice.randrange(3))

    def buffer(self):
        flag = self.dice.random() < 0.5
        number, digest = self.number(), self.digest()
        return self.dice.choice(
            [
                Empty(),
                Filling(number, self.number(), self.number()),
                Holding(number, digest, flag),
                Withdrawing(number, digest, flag, self.dice.random() < 0.5),
                Poisoned(),
            ]
        )

    def call(self):
        verb = self.dice.choice(["publish", "unpublish", "replicate", "update"])
        spec = "" if verb == "unpublish" else self.dice.choice([self.number(), "latest", "latest-1"])
        resolved = self.dice.choice([None, self.number()])
        return CallReport(self.number(), verb, spec if verb != "publish" else self.number(), self.digest(), resolved)

    def report(self, number: int) -> Report:
        maybe = self.dice.random
        return Report(
            number if maybe() < 0.8 else self.number(),
            session=self.number(),
            seen=self.number(),
            buffer=self.buffer(),
            layout=self.digest(),
            size_bytes=self.number(),
            call=self.call() if maybe() < 0.7 else None,
            reading=Reading(self.number(), self.worker(), self.number()) if maybe() < 0.5 else None,
            closed=self.number(),
            newest=self.dice.choice([None, None, self.number()]),
            failures=tuple(
                TicketFailure(self.number(), self.worker(), self.word(), self.word())
                for _ in range(self.dice.randrange(3))
            ),
            received_bytes={self.word(): self.number()},
            leaving=maybe() < 0.05,
        )

    def message(self, number: int):
        kind = self.dice.random()
        if kind < 0.05:
            return hello(model=self.dice.choice("mk"), replica=self.dice.choice("abc"), shard=0, shards=3)
        if kind < 0.08:
            spec = TensorSpec(self.word(), self.word(), (self.number(),), (self.number(),), 0, self.number())
            return LayoutInfo.of(Layout((spec,), self.number()))
        return self.report(number)


@pytest.mark.parametrize("seed", range(60))
def test_a_server_of_liars_goes_on(seed):
    liar = Liar(seed)
    now = 0.0
    server = Server(settings=Settings(lease_s=3), now=now, first_number=1000, fresh=seed % 5 > 0)
    lines = [f"line-{index}" for index in range(8)]
    for index, line in enumerate(lines):
        server.handle(hello(replica="abc"[index % 3], shard=index % 3, shards=3), sender=line, now=now)
    for number in range(1, 200):
        now += liar.dice.random() * 0.3
        line = liar.dice.choice(lines)
        if liar.dice.random() < 0.03:
            server.disconnected(line, now=now)
        message = decode_to_server(encode(liar.message(number)))
        for _, answer in server.handle(message, sender=line, now=now):
            encode(answer)
        if liar.dice.random() < 0.1:
            server.tick(now=now)
    msgspec.json.encode(server.status(now=now))
