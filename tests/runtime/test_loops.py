"""The worker loop and its threads: whatever they carry, a failure included, they let go of."""

import asyncio
import weakref

import pytest

from runtime.kit import eventually
from tensorhub.runtime.loops import in_thread


class Burden:
    """What a piece of work knows."""

    def fail(self):
        raise OSError("the work failed")


@pytest.mark.usefixtures("no_collector")
def test_work_that_failed_in_a_thread_is_let_go():
    async def story():
        burden = Burden()
        with pytest.raises(OSError, match="the work failed"):
            await in_thread(burden.fail, name="test")
        return weakref.ref(burden)

    left = asyncio.run(story())
    eventually(lambda: left() is None, "nobody holds what the work knew")


def test_work_in_a_thread_brings_its_result():
    async def story():
        return await in_thread(lambda: 7, name="test")

    assert asyncio.run(story()) == 7
