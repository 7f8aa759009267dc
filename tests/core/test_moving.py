"""When a reader looks for another source than one that is lost, and from which nothing comes."""

from tensorhub.protocol.messages import CallReport, Filling, Holding, Reading
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId
from tensorhub.server.members import OpenRead

from .kit import worker
from .town import Town

ONE, ROOT = Version(1), Digest("r")
FIRST, SECOND, THIRD, READER = worker("first"), worker("second"), worker("third"), worker("reader")


class Stalled:
    """Nothing comes for a reader. It reports once a second, as the sources do that live."""

    def __init__(self, *sources: WorkerId, lease_s: float, slow_s: float) -> None:
        self.town = Town(lease_s=lease_s, report_s=1.0, stalled_s=2.0, slow_s=slow_s, rebalance_s=5.0)
        self.living: dict[WorkerId, None] = {}
        self.joins(*sources)
        self.call = CallReport(1, "replicate", 1)
        self.town.joins(READER)
        self.town.says(READER, call=self.call)
        self.reports()

    def joins(self, *sources: WorkerId) -> None:
        for source in sources:
            self.living[source] = None
            self.town.joins(source, buffer=Holding(ONE, ROOT))

    def falls_silent(self, source: WorkerId) -> None:
        del self.living[source]

    @property
    def read(self) -> OpenRead:
        return self.town.server.state.reads.current[READER]

    def reports(self) -> None:
        read = self.read
        closed, reading = Ticket(read.ticket - 1), Reading(read.ticket, read.source, ONE)
        self.town.says(READER, call=self.call, buffer=Filling(ONE), reading=reading, closed=closed)

    def until(self, now: float) -> None:
        while self.town.now < now:
            self.town.until(self.town.now + 1.0)
            for source in self.living:
                self.town.says(source, buffer=Holding(ONE, ROOT))
            self.reports()


def moved_to_one_that_is_lost() -> Stalled:
    """It may move again at 14 s. At 5 s it looks for another source all the same, as its own is lost: there is none."""
    stalled = Stalled(FIRST, SECOND, lease_s=3.0, slow_s=6.0)
    stalled.falls_silent(SECOND)
    stalled.until(2.0)
    assert stalled.read.source == SECOND, "nothing came from the first one"
    stalled.until(5.0)
    assert SECOND not in stalled.town.server.state.members
    assert (stalled.read.source, stalled.read.looked_at) == (SECOND, 5.0)
    assert stalled.town.server.state.known(READER).may_move_at == 14.0
    return stalled


def test_who_reads_in_vain_and_has_moved_lately_goes_to_one_that_comes_before_it_may_move_again() -> None:
    stalled = moved_to_one_that_is_lost()
    stalled.joins(THIRD)
    stalled.until(11.0)
    assert stalled.read.source == THIRD


def test_who_reads_in_vain_does_not_look_at_all_sources_with_each_report() -> None:
    """There may be thousands of them."""
    stalled, looked_at = moved_to_one_that_is_lost(), []
    for now in range(6, 13):
        stalled.until(float(now))
        looked_at.append(stalled.read.looked_at)
    assert looked_at == [5.0] * 5 + [11.0] * 2


def test_who_may_move_leaves_a_lost_source_at_once_though_it_looked_for_an_idle_one_just_before() -> None:
    stalled = Stalled(FIRST, lease_s=4.0, slow_s=3.0)
    stalled.until(7.0)
    stalled.falls_silent(FIRST)
    stalled.until(9.0)
    stalled.joins(SECOND)
    stalled.until(10.0)
    assert (stalled.read.source, stalled.read.looked_at) == (FIRST, 10.0)
    assert stalled.town.server.state.known(READER).may_move_at == 11.0
    stalled.until(11.0)
    assert FIRST not in stalled.town.server.state.members
    assert stalled.read.source == SECOND
