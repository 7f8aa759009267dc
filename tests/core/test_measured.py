"""How a read goes: told with the report, and shown with the transfer."""

from msgspec.structs import replace

from tensorhub.protocol.messages import Reading
from tensorhub.protocol.names import Ticket, Version
from tensorhub.worker.events import ReadMeasured
from tensorhub.worker.read_slot import ReadSlot
from tensorhub.worker.state import news_of

from .kit import grant, report, worker

LOCAL = ReadMeasured(Ticket(5), "local", "process_vm_readv, 2 threads", "", 1000)


def reading(**told: object) -> Reading:
    return replace(Reading(Ticket(5), worker("trainer"), Version(1)), **told)


def test_only_the_open_read_is_described() -> None:
    slot = ReadSlot(worker("rollout"))
    slot.measured(LOCAL)
    assert slot.reading is None
    slot.extend_trust(10.0)
    slot.take_grant(grant(5))
    slot.start()
    slot.measured(replace_ticket(LOCAL, 4))
    assert slot.reading is not None
    assert slot.reading.transport == ""
    slot.measured(LOCAL)
    assert (slot.reading.transport, slot.reading.rate_bytes_per_s) == ("local", 1000)
    ended, _ = slot.ended(Ticket(5))
    assert ended.ticket == 5


def replace_ticket(event: ReadMeasured, ticket: int) -> ReadMeasured:
    return ReadMeasured(Ticket(ticket), event.transport, event.path, event.why, event.rate_bytes_per_s)


def test_another_way_is_news_and_another_rate_is_not() -> None:
    slow = report(1, reading=reading(transport="tcp", rate_bytes_per_s=10))
    fast = report(1, reading=reading(transport="tcp", rate_bytes_per_s=20))
    other = report(1, reading=reading(transport="local", rate_bytes_per_s=10))
    assert news_of(slow) == news_of(fast)
    assert news_of(slow) != news_of(other)
