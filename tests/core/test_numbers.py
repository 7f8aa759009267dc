"""What one worker tells of numbers: nobody's are taken along, and no version number is taken, without a receipt."""

import pytest

from tensorhub.protocol.messages import (
    PROTOCOL,
    CallReport,
    Filling,
    Hello,
    Holding,
    HostCopy,
    Orders,
    Poisoned,
    Reading,
    Refusal,
    Report,
)
from tensorhub.protocol.names import Digest, Number, Shard, Ticket, Version
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
from tensorhub.server.members import Line
from tensorhub.server.rules.calls import next_version
from tensorhub.server.state import BLOCK, MAX_CEILING, Numbers
from tensorhub.server.versions import Notary

from .kit import worker

SETTINGS = Settings(lease_s=4.0, report_s=1.0)
HIGHEST = 2**62


def server(first: int = 1000, *, fresh: bool = True, key: bytes = b"") -> Server:
    return Server(SETTINGS, 0.0, first, fresh=fresh, key=key)


def hear(found: Server, name: str, now: float = 0.0, **told: object) -> Orders:
    """The answer to a report of that replica's one worker."""
    me = worker(name)
    found.handle(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, name), sender=name, now=now)
    number = told.pop("number", 1)
    out = found.handle(Report(number=number, **told), sender=name, now=now)  # type: ignore[arg-type]
    orders = [message for sender, message in out if sender == name]
    assert orders, out
    assert isinstance(orders[-1], Orders), orders
    return orders[-1]


@pytest.mark.parametrize("what", ["seen", "session", "closed"])
def test_a_number_that_no_server_gave_out_takes_nobody_along(what: str) -> None:
    found = server()
    hear(found, "liar", **{what: HIGHEST})
    assert hear(found, "honest").number < 2000
    assert found.state.counters["odd_numbers"] == 1


def test_a_restarted_server_goes_on_above_what_was_signed_for() -> None:
    former = server(5_000_000)
    known = hear(former, "a")
    found = server(10, fresh=False)
    told = {"seen": known.number, "session": known.session}
    assert hear(found, "a", **told, ceiling=known.ceiling, ceiling_receipt=known.ceiling_receipt).number > known.number


def test_far_ahead_is_believed_only_with_a_receipt_of_the_same_key() -> None:
    far = server(10 * BLOCK, key=b"one")
    known = hear(far, "a")
    told = {"seen": known.number, "ceiling": known.ceiling, "ceiling_receipt": known.ceiling_receipt}
    assert hear(server(10, fresh=False, key=b"one"), "a", **told).number > known.number
    assert hear(server(10, fresh=False, key=b"other"), "a", **told).number < BLOCK


def test_reports_that_repeat_this_lifes_own_ceiling_raise_its_numbers_by_one_block_at_most() -> None:
    """A worker is told each ceiling with its orders: no report may turn that into the next one."""
    found = server()
    orders = hear(found, "liar")
    for number in range(2, 50):
        told = {"ceiling": orders.ceiling, "ceiling_receipt": orders.ceiling_receipt}
        orders = hear(found, "liar", number=number, seen=orders.ceiling, session=orders.ceiling, **told)
    assert hear(found, "honest").number < 1000 + BLOCK + 200


@pytest.mark.parametrize("ceiling", [MAX_CEILING + 1, HIGHEST])
def test_a_ceiling_that_no_life_reaches_is_not_believed_though_it_is_signed(ceiling: int) -> None:
    found = server(fresh=False)
    receipt = found.state.notary.ceiling(Number(ceiling))
    hear(found, "a", seen=Number(ceiling), ceiling=Number(ceiling), ceiling_receipt=receipt)
    assert hear(found, "b").ceiling < 10 * BLOCK
    assert found.state.counters["odd_numbers"] == 1


def test_a_new_block_is_signed_when_one_is_used_up() -> None:
    numbers = Numbers(0, Notary())
    numbers.last = BLOCK
    assert numbers.next() == BLOCK + 1
    assert numbers.ceiling > BLOCK + 1
    assert numbers.receipt == Notary().ceiling(numbers.ceiling)


def test_the_newest_version_is_believed_with_a_receipt_only() -> None:
    found = server()
    hear(found, "liar", newest=Version(HIGHEST))
    assert found.state.models["policy"].newest is None  # type: ignore[index]
    receipt = Notary().newest(worker("a").model, Version(7))
    hear(found, "a", newest=Version(7), newest_receipt=receipt)
    assert found.state.models["policy"].newest == 7  # type: ignore[index]
    hear(found, "b", newest=Version(8), newest_receipt=receipt)
    assert found.state.models["policy"].newest == 7  # type: ignore[index]


HELD = Holding(Version(HIGHEST), Digest("x"))
WORDS = {
    "filling": {"buffer": Filling(Version(HIGHEST))},
    "holding": {"buffer": HELD},
    "published": {"buffer": Holding(Version(HIGHEST), Digest("x"), published=True)},
    "a copy": {"copies": (HostCopy(1, Version(HIGHEST), Digest("x"), 1, 1, whole=True),)},
    "a claim": {"claim": Version(HIGHEST), "claimed_in": Number(1)},
    "an answer": {"call": CallReport(1, "publish", HIGHEST, Digest("x"), resolved=Version(HIGHEST)), "buffer": HELD},
    "a forged receipt": {"buffer": HELD, "newest": Version(HIGHEST), "newest_receipt": "x"},
    "a next one": {"buffer": Holding(Version(2**53 + 1), Digest("x"))},
}


@pytest.mark.parametrize("told", WORDS.values(), ids=WORDS)
def test_a_version_that_no_publish_could_make_exists_nowhere(told: dict) -> None:
    """A worker that shows one is sent away for a moment, and its next report may be right."""
    found, me = server(), worker("liar")
    publish(found, "trainer", 7, "right")
    for number in (1, 2):
        found.handle(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, "liar"), sender="liar", now=0.0)
        ((_, refusal),) = found.handle(Report(number=number, **told), sender="liar", now=0.0)
        assert isinstance(refusal, Refusal)
        assert refusal.retry_s > 0
    assert next_version(found.state, me.model) == 8
    assert found.state.models[me.model].newest == 7
    assert hear(found, "liar", number=3).acknowledged == 3


def test_a_high_version_is_held_where_a_receipt_or_the_newest_one_is_near() -> None:
    """Numbers may have risen above those that a model begins with, in many steps."""
    high = Version(2**53 + 5)
    held = Holding(high, Digest("r"))
    found = server(fresh=False)
    receipt = found.state.notary.newest(worker("a").model, high)
    hear(found, "a", buffer=held, newest=high, newest_receipt=receipt)
    hear(found, "b", buffer=Holding(Version(high + 1), Digest("r")))
    assert found.state.models[worker("a").model].newest == high + 1


def publish(found: Server, name: str, version: int, root: str) -> None:
    """One replica of one shard publishes, from its call to its end."""
    call = CallReport(1, "publish", version, Digest(root))
    hear(found, name, number=2, layout=Digest("l"), call=call)
    held = Holding(Version(version), Digest(root), published=True)
    found.handle(Report(number=3, layout=Digest("l"), call=call, buffer=held), sender=name, now=0.0)
    out = found.handle(Report(number=4, layout=Digest("l"), buffer=held, ended=1, finished=1), sender=name, now=0.0)
    assert not any(isinstance(message, Refusal) for _, message in out)


def test_who_has_the_receipt_is_believed_whoever_is_heard_first() -> None:
    former = server()
    publish(former, "real", 7, "right")
    receipt = former.state.notary.content(worker("real").model, Version(7), worker("real").shard, Digest("right"))
    right, wrong = (Holding(Version(7), Digest(root), published=True) for root in ("right", "wrong"))
    for first in ("left", "real"):
        found = server(10, fresh=False)
        for name in (first, "real" if first == "left" else "left"):
            told = {"buffer": right, "receipts": {7: receipt}} if name == "real" else {"buffer": wrong}
            hear(found, name, **told, layout=Digest("l"))
        orders = hear(found, "left", number=2, buffer=wrong, layout=Digest("l"))
        assert orders.conflict == "wrong"
        left = found.state.known(worker("left"))
        assert (left.report.buffer, left.content.buffer) == (wrong, Poisoned()), "what it said stays as it came"
        assert hear(found, "real", number=2, buffer=right, receipts={7: receipt}, layout=Digest("l")).conflict == ""
        record = found.state.models["policy"].versions[Version(7)]  # type: ignore[index]
        assert [each.replica for each in record.holders[Line(1, Shard(0))]] == ["real"]


def test_a_receipt_is_for_one_content_of_one_shard() -> None:
    notary, me = Notary(b"key"), worker("a")
    receipt = notary.content(me.model, Version(7), me.shard, Digest("x"))
    others = [
        notary.content(me.model, Version(7), me.shard, Digest("y")),
        notary.content(me.model, Version(8), me.shard, Digest("x")),
        Notary(b"other").content(me.model, Version(7), me.shard, Digest("x")),
        notary.newest(me.model, Version(7)),
        notary.ceiling(Number(7)),
    ]
    assert receipt not in others
    assert len(dict.fromkeys(others)) == len(others)


def test_a_read_under_a_ticket_that_nobody_gave_out_is_not_adopted() -> None:
    found = server(10, fresh=False)
    hear(found, "a", reading=Reading(Ticket(HIGHEST), worker("b"), Version(7)))
    assert found.state.reads.all() == []
