"""The dashboard in a real browser, while a job runs."""

import asyncio
from urllib.parse import urlsplit

import numpy as np
import pytest
from msgspec.structs import replace

import tensorhub
from runtime.kit import hello, line_to, own_token
from tensorhub.protocol.messages import Report

from .browser import CHROMIUM, chromium, tab_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome in PATH"),
]

MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'


def row(name):
    """The text of a replica's row."""
    names = "[...document.querySelectorAll('#replicas tbody tr')]"
    return f"{names}.find(row => row.cells[0].innerText.startsWith('{name}'))?.innerText ?? ''"


async def steps(address, server, trainer, rollout, tensors):
    url = f"http://{server.address}/"
    async with tab_of(address) as tab, line_to(server.address) as line:
        await tab.open(url)
        await tab.until("document.activeElement.id === 'token'")
        assert not await tab.text("#lead")

        for token, shown in (("wrong", "another token"), (own_token(), "Show")):
            await tab.do("Input.insertText", text=token)
            await tab.press("Enter", 13, "\r")
            if token == "wrong":
                await tab.until(f"document.querySelector('#wrong').innerText.includes('{shown}')")
        await tab.until("document.querySelector('#lead').innerText.includes('newest version')")
        assert "The trainer publishes the weights of model policy" in await tab.text("#lead")
        assert "1 has the newest version" in await tab.text("#lead")
        assert await tab.text("#lead") in (await tab.text())[:600], "the page opens with it"

        await line.send_bytes(_encoded(replace(hello(replica="odd", model="policy"), host=MARKUP, site=MARKUP)))
        await line.send_bytes(_encoded(Report(1)))
        await tab.until(f"({row('odd')}).includes('onerror')")
        async with line_to(server.address, hello(replica=MARKUP)):
            await tab.until("document.querySelector('#events').innerText.includes('<img src=x')")
        assert await tab.run("document.images.length + document.querySelectorAll('main script').length") == 0
        assert await tab.run("window.hit") is None

        await asyncio.to_thread(publish, trainer, tensors)
        await tab.until(f"({row('rollout')}).includes('1 version')")
        await tab.until("document.querySelector('#versions').innerText.includes('policy 2')")
        await asyncio.to_thread(rollout.update, 2)
        await tab.until(f"({row('rollout')}).includes('holding version 2')")
        assert await tab.run("document.querySelectorAll('#replicas svg .lag').length") >= 1

        await keyboard(tab)
        for width, height in ((390, 844), (768, 1024), (1440, 900), (3840, 2160)):
            await tab.look(width, height, is_dark=width < 1000)
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), width

        assert {urlsplit(each).netloc for each in tab.urls if not each.startswith("data:")} == {server.address}
        assert not any(own_token() in each for each in tab.urls)
        assert [each for each in tab.problems if "401" not in each] == []

        await tab.open(url)  # the tab keeps the token
        await tab.until("document.querySelector('#lead').innerText.includes('policy')")
        for each in (rollout, trainer, server):
            await asyncio.to_thread(each.close)
        await tab.until("document.querySelector('#state').innerText.includes('does not answer')")


def publish(trainer, tensors):
    with trainer.mutating(version=2):
        tensors["w"] += 1


def _encoded(message):
    from tensorhub.runtime.connection import encode

    return encode(message)


async def keyboard(tab):
    """Tab reaches all that can be used; the search and the box for warnings work without a mouse."""
    reached = []
    while len(reached) < 4:
        await tab.press("Tab", 9)
        here = await tab.run("document.activeElement.id || document.activeElement.className")
        if not here or here in reached:
            continue
        reached.append(here)
        if here == "find":
            await tab.do("Input.insertText", text="odd")
            await tab.until("document.querySelectorAll('#replicas tbody tr').length === 1")
            await tab.run("(document.querySelector('#find').value = '', render())")
        if here == "warnings":
            await tab.press(" ", 32, " ")
            await tab.until("[...document.querySelectorAll('#events li')].every(each => each.innerText.includes('▲'))")
    assert sorted(reached) == ["events", "find", "skip", "warnings"]


def test_the_page_shows_a_running_job_and_runs_nothing_that_workers_say():
    ours, theirs = {"w": np.zeros(1000)}, {"w": np.zeros(1000)}
    with (
        chromium() as address,
        tensorhub.serve(lease_s=60, report_s=0.2) as server,
        tensorhub.open("policy", replica="trainer", server=server.address) as trainer,
        tensorhub.open("policy", replica="rollout", server=server.address) as rollout,
    ):
        trainer.register(ours)
        rollout.register(theirs)
        trainer.publish(1)
        rollout.replicate(1)
        asyncio.run(steps(address, server, trainer, rollout, ours))
