"""`View.events`: what a real server tells of real workers, and what a worker's own log says of its calls."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading

import aiohttp
import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually
from tensorhub import aio
from tensorhub.protocol import events


def kinds(found):
    return [type(each).__name__ for each in found]


def test_a_job_is_told_once_and_its_end_warns_of_nothing(server, caplog):
    view = tensorhub.connect(server.address)
    followed = []

    def follow():
        for event in view.events(follow=True, model="m"):
            followed.append(event)
            if isinstance(event, events.Left) and event.replica == "t":
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    with caplog.at_level(logging.INFO, logger="tensorhub"):
        trainer, rollout = (tensorhub.open("m", replica=name, server=server.address) for name in "tr")
        for weights in (trainer, rollout):
            weights.register({"w": np.ones(50_000, dtype=np.float32)})
        trainer.publish(3)
        rollout.replicate()
        rollout.close()
        trainer.close()
        thread.join(20)
    assert not thread.is_alive()
    found = list(view.events())
    assert kinds(found)[0] == "ServerStarted"
    told = [each for each in found if not isinstance(each, events.Offloaded)]
    ours = ["Joined", "Joined", "WriterChanged", "Published", "ReadFinished", "Left", "Left"]
    assert kinds(told)[1:] == ours
    read = next(each for each in told if isinstance(each, events.ReadFinished))
    assert (read.replica, read.source, read.version, read.size_bytes) == ("r", "t", 3, 200_000)
    assert read.is_verified
    assert read.transport
    assert read.seconds > 0
    assert [each.number for each in found] == list(range(found[0].number, found[0].number + len(found)))
    assert followed == found[1:], "one that follows gets the same, and only those of its model"
    assert list(view.events(after=found[-2].number)) == found[-1:]
    assert list(view.events(model="other")) == []
    logged = [record for record in caplog.records if record.name == "tensorhub.events"]
    assert len(logged) >= len(found) - 1, "the server was started before"
    assert [record.getMessage() for record in logged] == [each.text for each in found[-len(logged) :]]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "is to read" not in caplog.text, "permissions to read are logged at debug"
    calls = [record.getMessage() for record in caplog.records if record.name == "tensorhub.runtime.driver"]
    assert [line.partition(" in ")[0] for line in calls] == [
        "m/t[0] published version 3",
        "m/r[0] updated to version 3",
    ]
    assert "B/s from m/t[0] by " in calls[1]


def test_coroutines_follow_too_and_a_refusal_is_told_once(server):
    async def story():
        view = aio.connect(server.address)
        for _ in range(2):
            with pytest.raises(tensorhub.Refused):
                await aio.open("m", replica="r", server=server.address, token="another")
        async for event in view.events(follow=True):
            if isinstance(event, events.Refused):
                break
        assert (event.replica, event.address) == ("r", "127.0.0.1")
        assert "another token" in event.text
        return [each async for each in view.events() if isinstance(each, events.Refused)]

    assert len(asyncio.run(asyncio.wait_for(story(), 20))) == 1


def test_over_http_it_wants_the_token_and_numbers_that_are_some(server):
    async def ask(query, **headers):
        async with aiohttp.ClientSession(headers=headers) as http:
            answer = await http.get(f"http://{server.address}/v1/events{query}")
            return answer.status, await answer.text()

    known = {"Authorization": f"Bearer {server.token}"}
    assert asyncio.run(ask(""))[0] == 401
    assert asyncio.run(ask("?after=x", **known))[0] == 400
    status, text = asyncio.run(ask("?after=9223372036854775807", **known))
    assert status == 200, "a number of no event of this server: all that there are"
    assert '"kind":"server_started"' in text


SOURCE = """
import os, sys, numpy as np, tensorhub
weights = tensorhub.open("m", replica="t", server={server!r}, transports="tcp")
weights.register({{"w": np.ones(4 << 20, dtype=np.float32)}})
weights.publish(1)
print("published", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_source_that_stands_still_is_the_reason_that_server_and_worker_give(caplog):
    with tensorhub.serve(lease_s=60, report_s=0.5) as server, contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", SOURCE.format(server=server.address)]
        pipe = subprocess.PIPE
        source = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(source.kill)
        assert source.stdout.readline() == "published\n"
        rollout = tensorhub.open("m", replica="r", server=server.address, transports="tcp")
        rollout.register({"w": np.zeros(4 << 20, dtype=np.float32)})
        view = tensorhub.connect(server.address)
        os.kill(source.pid, signal.SIGSTOP)
        with caplog.at_level(logging.INFO, logger="tensorhub"):
            thread = threading.Thread(target=rollout.replicate, args=(1,), kwargs={"timeout": 60}, daemon=True)
            thread.start()
            found = next(each for each in view.events(follow=True) if isinstance(each, events.Stalled))
            assert re.search(r"(^|from )t\b", found.waits_for), found
            assert found.call == "replicate(1)"
            assert not found.is_over
            waits = rollout._client.driver._waits
            eventually(lambda: waits.text, "the worker has waited for long")
            os.kill(source.pid, signal.SIGCONT)
            thread.join(60)
        assert not thread.is_alive()
        over = next(each for each in view.events(follow=True) if isinstance(each, events.Stalled) and each.is_over)
        assert over.waited_s >= found.waited_s
        (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("m/r[0] updated to version 1")]
        assert "; waited " in line
        assert "m/t[0]" in line.partition("; waited ")[2]
        rollout.close(timeout=5)
