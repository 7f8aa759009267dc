"""Answers of the server: long polls, and the status of a large fleet in slices."""

import asyncio
import time

import msgspec
import pytest

from bench.fleet import Fleet
from tensorhub.protocol.settings import Settings
from tensorhub.protocol.status import Status
from tensorhub.runtime import answers
from tensorhub.runtime.answers import Polls, Shown, encode_status, take_status
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


async def test_a_hundred_who_ask_the_same_are_one_question() -> None:
    question, polls = Question(), Polls()
    running = asyncio.ensure_future(polls.run())
    waiting = [asyncio.ensure_future(polled(question, polls)) for _ in range(100)]
    await told(polls, question, times=3)
    question.value = 3
    polls.note()
    assert await asyncio.gather(*waiting) == [3] * 100
    running.cancel()
    assert question.asked <= 5


@pytest.mark.parametrize("value", [0, 3])
async def test_at_the_end_nobody_waits(value: int) -> None:
    question, polls = Question(), Polls()
    waiting = asyncio.ensure_future(polled(question, polls))
    await told(polls, question, times=1)
    question.value = value
    polls.note()
    polls.end()
    assert await waiting == value


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


async def test_in_steps_it_is_the_same_picture(fleet):
    whole = fleet.server.status(now=fleet.now)
    status = await take_status(fleet.server, fleet.now)
    encoded = await encode_status(status)
    assert status == whole
    assert encoded == msgspec.json.encode(whole)
    assert msgspec.json.decode(encoded, type=Status) == whole
    new, old = whole.models[0].versions
    assert new.holders, "the trainer at least"
    assert new.filling
    assert old.holders
    assert whole.transfers


async def test_the_others_run_meanwhile(fleet, monkeypatch):
    """With slices of no length: a turn of the loop for each replica, and for each replica's JSON."""
    monkeypatch.setattr(answers, "SLICE_S", 0.0)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    status = await take_status(fleet.server, fleet.now)
    assert turns >= REPLICAS - 1
    turns = 0
    await encode_status(status)
    assert turns >= REPLICAS - 1
    counting.cancel()


async def test_what_changes_between_two_steps_is_no_mistake():
    """A replica that was looked at may go, and one that is to be looked at may be gone."""
    fleet = Fleet(8, 2)
    fleet.join()
    taking = asyncio.create_task(take_status(fleet.server, fleet.now))
    await asyncio.sleep(0)
    for thin in (fleet.rollouts[0], fleet.rollouts[-1]):
        fleet.kill(thin)
    fleet.run(within_s=12.0)
    assert len((await taking).models[0].replicas) == 4


async def test_all_who_ask_meanwhile_share_one_picture_that_is_newer_than_their_question(monkeypatch):
    machine, now = Server(Settings(), 100.0, 1, fresh=True), 100.0
    taken, has_begun = [], asyncio.Event()

    async def take(machine, now):
        taken.append(now)
        has_begun.set()
        await asyncio.sleep(0)
        return machine.status(now=now)

    monkeypatch.setattr(answers, "take_status", take)
    shown = Shown(machine, lambda: now)
    asking = [asyncio.create_task(shown.ask(None)) for _ in range(5)]
    await has_begun.wait()
    now = 107.5
    asking_later = [asyncio.create_task(shown.ask(model)) for model in (None, None, "m", "m")]
    first, later = await asyncio.gather(*asking), await asyncio.gather(*asking_later)
    assert taken == [100.0, 107.5]
    assert len({id(each) for each in first}) == 1
    assert [later[0] is later[1], later[2] is later[3]] == [True, True]
    assert msgspec.json.decode(later[0], type=Status).uptime_s == pytest.approx(7.5)
