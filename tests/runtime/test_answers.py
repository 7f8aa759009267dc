"""Answers of the server: long polls, and the status of a large fleet in slices."""

import asyncio
import time

import msgspec
import pytest

from bench.fleet import Fleet
from tensorhub.protocol.settings import Settings
from tensorhub.protocol.status import Status
from tensorhub.runtime import answers
from tensorhub.runtime.answers import SHARE, Polls, Shown, encode_status, take_status
from tensorhub.server import Server


class Question:
    """Counts how often it was asked, and is answered by `value`."""

    def __init__(self, *, takes_s: float = 0.0) -> None:
        self.asked, self.value, self._takes_s = 0, 0, takes_s

    def look(self) -> int:
        self.asked += 1
        until = time.monotonic() + self._takes_s
        while time.monotonic() < until:
            pass
        return self.value


async def polled(question: Question, polls: Polls, *, patience_s: float = 5.0, key: object = "key") -> int:
    return await polls.ask(key, question.look, lambda value: value >= 3, patience_s)


async def told(polls: Polls, question: Question, *, times: int) -> None:
    """There is news, over and over, until the question was asked so often."""
    while question.asked < times:
        polls.note()
        await asyncio.sleep(0.005)


def test_a_final_answer_comes_at_once_and_nobody_is_kept() -> None:
    question = Question()
    question.value = 3
    assert asyncio.run(polled(question, Polls())) == 3
    assert question.asked == 1


def test_a_hundred_who_ask_the_same_are_one_question() -> None:
    question = Question()

    async def ask() -> list[int]:
        polls = Polls()
        running = asyncio.ensure_future(polls.run())
        waiting = [asyncio.ensure_future(polled(question, polls)) for _ in range(100)]
        await told(polls, question, times=3)
        question.value = 3
        polls.note()
        found = await asyncio.gather(*waiting)
        running.cancel()
        return found

    assert asyncio.run(ask()) == [3] * 100
    assert question.asked <= 5


def test_who_has_no_patience_gets_the_answer_as_it_is() -> None:
    question = Question()
    assert asyncio.run(polled(question, Polls(), patience_s=0.0)) == 0
    assert asyncio.run(polled(question, Polls(), patience_s=0.05)) == 0


def test_a_question_that_takes_long_is_asked_seldom_and_its_last_answer_is_not_missed() -> None:
    question = Question(takes_s=0.01)

    async def ask() -> float:
        polls = Polls()
        running = asyncio.ensure_future(polls.run())
        waiting = asyncio.ensure_future(polled(question, polls))
        began = time.monotonic()
        await told(polls, question, times=4)
        question.value = 3
        polls.note()
        assert await waiting == 3
        running.cancel()
        return time.monotonic() - began

    took_s = asyncio.run(ask())
    assert (question.asked - 1) * 0.01 <= took_s * SHARE


@pytest.mark.parametrize("value", [0, 3])
def test_at_the_end_nobody_waits(value: int) -> None:
    question = Question()

    async def ask() -> int:
        polls = Polls()
        waiting = asyncio.ensure_future(polled(question, polls))
        await told(polls, question, times=1)
        question.value = value
        polls.note()
        polls.end()
        return await waiting

    assert asyncio.run(ask()) == value


# --- status -----------------------------------------------------------------------------------------------------------


REPLICAS = 20


@pytest.fixture(scope="module")
def fleet():
    """In mid-update: some hold the new version, some fill, some hold the old one."""
    found = Fleet(2 * REPLICAS, 2, read_s=1.0)
    found.join()
    found.publish(2)
    found.begin_update()
    found.run(within_s=0.7)
    return found


def test_in_steps_it_is_the_same_picture(fleet):
    async def both():
        status = await take_status(fleet.server, fleet.now)
        return status, await encode_status(status)

    whole = fleet.server.status(now=fleet.now)
    status, encoded = asyncio.run(both())
    assert status == whole
    assert encoded == msgspec.json.encode(whole)
    assert msgspec.json.decode(encoded, type=Status) == whole
    new, old = whole.models[0].versions
    assert new.holders, "the trainer at least"
    assert new.filling
    assert old.holders
    assert whole.transfers


def test_the_others_run_meanwhile(fleet, monkeypatch):
    """With slices of no length: a turn of the loop for each replica, and for each replica's JSON."""
    monkeypatch.setattr(answers, "SLICE_S", 0.0)

    async def story():
        turns = 0

        async def count():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        status = await take_status(fleet.server, fleet.now)
        taken, turns = turns, 0
        await encode_status(status)
        counting.cancel()
        return taken, turns

    taken, encoded = asyncio.run(story())
    assert taken >= REPLICAS - 1
    assert encoded >= REPLICAS - 1


def test_what_changes_between_two_steps_is_no_mistake(fleet):
    """A replica that was looked at may go, and one that is to be looked at may be gone."""
    fleet = Fleet(8, 2)
    fleet.join()

    async def story():
        taking = asyncio.create_task(take_status(fleet.server, fleet.now))
        await asyncio.sleep(0)
        for thin in (fleet.rollouts[0], fleet.rollouts[-1]):
            fleet.kill(thin)
        fleet.run(within_s=12.0)
        return await taking

    status = asyncio.run(story())
    assert len(status.models[0].replicas) == 4


def test_it_is_of_the_moment_when_it_is_asked_for():
    """Also where nobody has come yet, and nothing else moves the machine's clock."""
    machine = Server(Settings(), 100.0, 1, fresh=True)
    status = asyncio.run(take_status(machine, 107.5))
    assert status.uptime_s == pytest.approx(7.5)


def test_all_who_ask_meanwhile_share_one_picture_that_is_newer_than_their_question(monkeypatch):
    machine = Server(Settings(), 100.0, 1, fresh=True)
    taken, has_begun = [], asyncio.Event()

    async def take(machine, now):
        taken.append(now)
        has_begun.set()
        await asyncio.sleep(0)
        return machine.status(now=now)

    monkeypatch.setattr(answers, "take_status", take)

    async def story():
        now = 100.0
        shown = Shown(machine, lambda: now)
        first = [asyncio.create_task(shown.ask(None)) for _ in range(5)]
        await has_begun.wait()
        now = 107.5
        later = [asyncio.create_task(shown.ask(model)) for model in (None, None, "m", "m")]
        return await asyncio.gather(*first), await asyncio.gather(*later)

    first, later = asyncio.run(story())
    assert taken == [100.0, 107.5]
    assert len({id(each) for each in first}) == 1
    assert [later[0] is later[1], later[2] is later[3]] == [True, True]
    assert msgspec.json.decode(later[0], type=Status).uptime_s == pytest.approx(7.5)
