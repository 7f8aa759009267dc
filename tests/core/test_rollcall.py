"""Who lives, who is a witness of whom, what a server that has restarted makes of it, and what all that costs."""

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import Empty, Holding, Orders, Report
from tensorhub.protocol.names import Digest, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
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


# --- the tables -------------------------------------------------------------------------------------------------------


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
