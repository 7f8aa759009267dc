"""Who lives, who is a witness of whom, what a server that has restarted makes of it, and what all that costs."""

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import CallReport, Empty, Holding, Orders, Report, Roster
from tensorhub.protocol.names import Digest, Number, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
from tensorhub.server.members import Roll, Tally
from tensorhub.server.versions import Notary

from .kit import hello, worker
from .town import Town

SETTINGS = Settings(default_retain=0)
MANY = 60
TRAINER = worker("trainer")
ROLLOUTS = [worker(f"rollout-{number:02}") for number in range(MANY)]


@dataclass
class Fleet:
    """A server, and workers that do as they are told, each in its turn."""

    fresh: bool = True
    first_number: int = 1
    now: float = 0.0
    numbers: dict[WorkerId, int] = field(default_factory=dict)
    heard: dict[WorkerId, Orders] = field(default_factory=dict)
    holds: dict[WorkerId, Version] = field(default_factory=dict)
    said: int = 0  # messages of the server

    def __post_init__(self) -> None:
        self.restart(fresh=self.fresh)

    def restart(self, *, fresh: bool = False) -> None:
        self.server = Server(SETTINGS, self.now, self.first_number, fresh=fresh)
        self.first_number += 1_000_000

    def report(self, who: WorkerId, **more: object) -> None:
        """It says how things are, and whoever is asked to be a witness says so too."""
        orders = self.heard.get(who)
        self.numbers[who] = self.numbers.get(who, 0) + 1
        shown = {"session": orders.session, "roster": orders.roster, "seen": orders.number} if orders else {}
        buffer = Holding(self.holds[who], Digest("r")) if who in self.holds else Empty()
        report = Report(self.numbers[who], buffer=buffer, **{**shown, **more})  # type: ignore[arg-type]
        self._deliver(self.server.handle(report, sender=str(who), now=self.now))

    def _deliver(self, outbox: list) -> None:
        asked = []
        for sender, message in outbox:
            assert isinstance(message, Orders), message
            self.said += 1
            who = next(each for each in self.numbers if str(each) == sender)
            self.heard[who] = message
            asked += [who] if message.witness else []
        for who in asked:
            self.report(who)

    def join(self, who: WorkerId, **more: object) -> None:
        self.server.handle(hello(who), sender=str(who), now=self.now)
        self.report(who, **more)

    def back(self, who: WorkerId, **more: object) -> None:
        """On a new connection it reports, hears the answer, and says so."""
        self.join(who, **more)
        self.report(who)

    @property
    def is_over(self) -> bool:
        return self.server.state.models[TRAINER.model].roll.is_over


def fleet_of(*workers: WorkerId) -> Fleet:
    """All of them have heard of all."""
    fleet = Fleet()
    for who in workers:
        fleet.join(who)
    for who in workers:
        fleet.report(who)
    return fleet


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_who_comes_is_told_of_by_one_message_to_one_other() -> None:
    fleet = fleet_of(TRAINER, *ROLLOUTS[:-1])
    before = fleet.said
    fleet.join(ROLLOUTS[-1])
    assert fleet.said - before == 3  # the answer, the question, and the answer to its answer


def test_not_everybody_asks_the_same_witness() -> None:
    fleet = fleet_of(TRAINER, *ROLLOUTS)
    assert max(fleet.numbers.values()) <= 3  # its first report, one as a witness, and the one in `fleet_of`


def test_all_at_once_ask_one_another_once() -> None:
    """Nobody has time to answer before all have come."""
    fleet = Fleet()
    outbox = []
    for who in (TRAINER, *ROLLOUTS):
        fleet.server.handle(hello(who), sender=str(who), now=0.0)
        fleet.numbers[who] = 1
        outbox += fleet.server.handle(Report(1), sender=str(who), now=0.0)
    fleet._deliver(outbox)
    for who in ROLLOUTS:
        fleet.report(who)
    assert not fleet.server.state.models[TRAINER.model].roll.unwitnessed
    assert fleet.said <= 4 * MANY


# --- the roll call ----------------------------------------------------------------------------------------------------


def test_a_restarted_server_goes_on_with_the_last_that_has_heard_it() -> None:
    fleet = fleet_of(TRAINER, *ROLLOUTS[:3])
    fleet.restart()
    for who in (TRAINER, *ROLLOUTS[:2]):
        fleet.back(who)
        assert not fleet.is_over
    fleet.join(ROLLOUTS[2])
    assert not fleet.is_over
    assert fleet.heard[ROLLOUTS[2]].roster is None
    fleet.report(ROLLOUTS[2])
    assert fleet.is_over
    assert fleet.server.is_recovering, "what cannot be taken back waits for the lease"
    assert fleet.heard[TRAINER].roster is not None


def test_a_report_that_is_told_twice_counts_once() -> None:
    fleet = fleet_of(TRAINER, ROLLOUTS[0])
    fleet.restart()
    fleet.back(TRAINER)
    shown = fleet.heard[TRAINER]
    fleet.report(TRAINER, session=shown.session)
    fleet.report(TRAINER, session=shown.session)
    assert not fleet.is_over


@pytest.mark.parametrize("change", ["number", "count", "digest", "receipt"])
def test_a_roster_that_was_changed_is_none(change: str) -> None:
    fleet = fleet_of(TRAINER, ROLLOUTS[0])
    roster = fleet.heard[TRAINER].roster
    assert roster is not None
    alone = f"{Notary().session(TRAINER, fleet.heard[TRAINER].session):x}"
    odd = {"number": 2**62, "count": 1, "digest": alone, "receipt": "0" * 24}[change]
    fleet.restart()
    fleet.back(TRAINER, roster=replace(roster, **{change: odd}))
    assert not fleet.is_over
    fleet.back(ROLLOUTS[0])
    assert not fleet.is_over
    assert fleet.server.state.models[TRAINER.model].roll.shown == roster


def test_a_roster_of_another_model_is_none() -> None:
    other = worker("trainer", model="draft")
    fleet = Fleet()
    fleet.join(TRAINER)
    fleet.join(other)
    theirs = fleet.heard[other].roster
    fleet.restart()
    fleet.back(TRAINER, roster=theirs)
    assert not fleet.is_over
    fleet.back(other)
    assert fleet.server.state.models[other.model].roll.is_over
    assert not fleet.is_over


def test_a_lease_is_the_most_that_it_waits() -> None:
    fleet = fleet_of(TRAINER, ROLLOUTS[0])
    fleet.restart()
    fleet.back(TRAINER)
    for _ in range(int(SETTINGS.lease_s)):
        fleet.now += 1.0
        assert not fleet.is_over
        fleet.report(TRAINER)
    assert fleet.is_over


def test_who_came_between_two_deaths_is_on_the_next_roll() -> None:
    fleet = fleet_of(TRAINER)
    fleet.restart()
    fleet.back(TRAINER)
    fleet.join(ROLLOUTS[0])
    fleet.restart()
    fleet.back(TRAINER)
    assert not fleet.is_over
    fleet.back(ROLLOUTS[0])
    assert fleet.is_over


# --- witnesses --------------------------------------------------------------------------------------------------------


def test_who_is_alone_needs_no_witness() -> None:
    fleet = Fleet()
    fleet.join(TRAINER)
    fleet.report(TRAINER, call=CallReport(1, "publish", 1, Digest("r")))
    answer = fleet.heard[TRAINER].answer
    assert answer is not None
    assert answer.version == 1


def test_another_is_asked_where_the_one_that_was_asked_is_silent() -> None:
    fleet = fleet_of(TRAINER, ROLLOUTS[0])
    sessions = fleet.server.state.models[TRAINER.model].roll
    fleet.server.disconnected(str(ROLLOUTS[0]), now=fleet.now)
    fleet.join(ROLLOUTS[1])
    assert ROLLOUTS[1] in sessions.witnessed
    assert fleet.numbers[TRAINER] == 4


def test_the_chosen_source_is_asked_when_a_grant_waits() -> None:
    fleet = fleet_of(TRAINER, ROLLOUTS[0])
    fleet.holds[TRAINER] = Version(1)
    fleet.report(TRAINER)
    who = ROLLOUTS[1]
    fleet.server.handle(hello(who), sender=str(who), now=0.0)
    fleet.numbers[who] = 1
    outbox = fleet.server.handle(Report(1, buffer=Empty()), sender=str(who), now=0.0)
    assert [sender for sender, message in outbox if message.witness] == [str(ROLLOUTS[0])]  # which does not answer
    (mine,) = [message for sender, message in outbox if sender == str(who)]
    wish = CallReport(1, "replicate", 1, resolved=Version(1))
    outbox = fleet.server.handle(Report(2, session=mine.session, call=wish), sender=str(who), now=0.0)
    assert [sender for sender, message in outbox if message.witness] == [str(TRAINER)]
    assert all(message.grant is None for _, message in outbox)
    fleet._deliver(outbox)
    granted = fleet.heard[who].grant
    assert granted is not None
    assert granted.source == TRAINER


# --- the tables -------------------------------------------------------------------------------------------------------


def test_the_same_set_has_the_same_sum_however_it_came_about() -> None:
    keys = [Notary().session(who, Number(7)) for who in ROLLOUTS[:4]]
    one, other = Tally(), Tally()
    for key in keys:
        one.add(key)
    for key in (keys[3], keys[0], keys[2], keys[1], keys[0]):
        other.add(key)
    assert one.digest != other.digest
    other.remove(keys[0])
    assert (one.count, one.digest) == (other.count, other.digest)
    assert one.is_that_of(Roster(Number(1), 4, other.digest, ""))
    assert Notary().session(ROLLOUTS[0], Number(8)) != keys[0]
    assert Notary(b"other").session(ROLLOUTS[0], Number(7)) != keys[0]


def test_sessions_up_to_a_number_are_witnessed_in_their_order() -> None:
    roll = Roll()
    for number, who in enumerate(ROLLOUTS[:4], start=1):
        roll.begin(who, Number(number), number)
    assert roll.witness(Number(2)) == ROLLOUTS[:2]
    assert roll.witness(Number(1)) == []
    roll.end(ROLLOUTS[2], 3)
    assert roll.witness(Number(4)) == [ROLLOUTS[3]]
    assert list(roll.witnessed) == [*ROLLOUTS[:2], ROLLOUTS[3]]


@pytest.mark.parametrize("mutes", [1, 3])
def test_those_who_report_and_never_show_the_roster_keep_nobody_waiting_for_long(mutes: int) -> None:
    """The first one is believed, for nobody was there before it; the others of them by mistake, one after the other."""
    town, other = Town(lease_s=4.0, report_s=1.0), worker("other")
    mute = [worker(f"mute-{number}") for number in range(mutes)]
    town.joins(mute[0], roster=None)
    roll = town.server.state.models[TRAINER.model].roll
    for who in mute[1:]:
        town.joins(who, roster=None)
        roll.witness(roll.unwitnessed[who])
    town.joins(TRAINER)
    town.joins(other)
    assert list(roll.unwitnessed) == [TRAINER, other]
    waited_s = 0
    while roll.unwitnessed:
        waited_s += 1
        assert waited_s <= 4 + 3 * mutes, "a lease, and three reports for each who is asked in turn"
        town.until(float(waited_s))
        for who in mute:
            town.says(who, roster=None)
        for who in (TRAINER, other):
            town.says(who)
    assert waited_s >= 4, "nobody is believed at once where others could know it"
