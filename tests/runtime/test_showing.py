"""The status of a large fleet: the same whether in one go or in steps, and others run meanwhile."""

import asyncio
import time

import msgspec
import pytest

from bench.fleet import Fleet
from tensorhub.protocol.settings import Settings
from tensorhub.protocol.status import Status
from tensorhub.runtime import answers
from tensorhub.runtime.answers import LONG_BYTES, MAX_REST_S, Shown, encode_status, take_status
from tensorhub.server import Server

REPLICAS = 100


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
    assert taken >= REPLICAS
    assert encoded >= REPLICAS


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


def test_who_gives_up_takes_the_picture_from_nobody():
    machine = Server(Settings(), 100.0, 1, fresh=True)

    async def story():
        shown = Shown(machine, lambda: 101.0)
        hasty, patient = (asyncio.create_task(shown.ask(None)) for _ in range(2))
        await asyncio.sleep(0)
        hasty.cancel()
        return await patient

    assert msgspec.json.decode(asyncio.run(story()), type=Status).uptime_s == pytest.approx(1.0)


def test_after_a_long_picture_it_rests():
    """At most for so long: people wait."""
    shown = Shown(Server(Settings(), 100.0, 1, fresh=True), lambda: 101.0)
    for size_bytes in (0, LONG_BYTES, 100 * LONG_BYTES):
        began = time.monotonic()
        shown._rest_after(began, size_bytes)
        assert shown._rests_until <= time.monotonic() + MAX_REST_S
    assert shown._rests_until >= began + MAX_REST_S
