"""The status of a large fleet: the same whether in one go or in steps, and others run meanwhile."""

import asyncio

import msgspec
import pytest

from benchmarks.fleet import Fleet
from tensorhub.core.server import Server
from tensorhub.core.settings import Settings
from tensorhub.core.snapshot import Status
from tensorhub.runtime import showing
from tensorhub.runtime.showing import encode_status, take_status

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
    monkeypatch.setattr(showing, "SLICE_S", 0.0)

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
