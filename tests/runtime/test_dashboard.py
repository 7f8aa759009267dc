"""The dashboard without a browser: its page, and what is sent to it. test_browser.py has a browser."""

import asyncio
import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

import tensorhub
from tensorhub.protocol.messages import Report
from tensorhub.runtime.dashboard import page

from .kit import eventually, hello, line_to, own_token, within

MARKUP = '<img src=x onerror="window.hit=1">'


def fetch(address, path, *, token=None, **headers):
    """Status, headers and text of an answer."""
    shown = {"Authorization": f"Bearer {own_token() if token is None else token}"} | headers
    try:
        request = urllib.request.Request(f"http://{address}{path}", headers=shown)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as answer:
        return answer.code, answer.headers, answer.read().decode()


def changes(address, after=""):
    """What the page gets after that cursor."""
    status, _, text = fetch(address, f"/v1/dashboard?after={after}")
    assert status == 200, text
    return json.loads(text)


def quiet_after(address, cursor):
    """The cursor after the first look that has found nothing new: rows do not change by getting older."""

    def is_quiet():
        nonlocal cursor
        answer = changes(address, cursor)
        cursor = answer["next"]
        return [patch["set"] for patch in answer["patches"]] == [{}]

    eventually(is_quiet, "a look finds nothing new")
    return cursor


def columns():
    """The names of the columns of each table, as the page has them."""
    (found,) = re.findall(r"const COLUMNS = \{.*?\n(.*?)\n\};", page()[0], re.DOTALL)
    return {name: re.findall(r'"(\w+)"', names) for name, names in re.findall(r"(\w+): \[(.*?)\]", found, re.DOTALL)}


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=4, report_s=0.2) as running:
        yield running


@pytest.fixture
def pair(server):
    """A trainer that has published version 1, and a rollout that has read it."""
    ours, theirs = {"w": np.zeros(1000)}, {"w": np.zeros(1000)}
    with (
        tensorhub.open("policy", replica="trainer", server=server.address, site="a") as trainer,
        tensorhub.open("policy", replica="rollout", server=server.address, site="b") as rollout,
    ):
        trainer.register(ours)
        rollout.register(theirs)
        trainer.publish(1)
        rollout.replicate(1)
        yield trainer, rollout


def test_the_page_has_no_data_and_asks_for_nothing_elsewhere(server):
    status, headers, text = fetch(server.address, "/", token="")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert '<body data-token="wanted">' in text
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert re.findall(r"https?://[\w.]+", text) == ["http://www.w3.org"], "the name of SVG"
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(| on\w+=|style=", text)
    with tensorhub.serve(insecure=True) as insecure:
        assert "<body>" in fetch(insecure.address, "/", token="")[2]
        assert fetch(insecure.address, "/v1/dashboard", token="")[0] == 200


def test_data_are_behind_the_token_and_no_page_of_others_gets_them(server):
    assert fetch(server.address, "/v1/dashboard", token="")[0] == 401
    assert fetch(server.address, "/v1/dashboard", token="wrong")[0] == 401
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert fetch(server.address, "/", **link)[0] == 200, "a link in a wiki"
    assert fetch(server.address, "/v1/dashboard", **link)[0] == 403
    assert fetch(server.address, "/", **(link | {"Sec-Fetch-Dest": "iframe"}))[0] == 403
    assert fetch(server.address, "/", Origin="http://example.org", **link)[0] == 403


def test_the_first_answer_has_everything_and_the_next_what_changed(server, pair):
    trainer, rollout = pair
    first = changes(server.address)
    whole = first["whole"]
    assert whole["models"] == {"policy": ["policy", 1, 1, 1, 8000]}
    assert sorted(whole["replicas"]) == ["policy/rollout", "policy/trainer"]
    assert [event[2] for event in whole["events"]][-2:] == ["published", "read_finished"]
    named = columns()
    (published,) = [dict(zip(named["events"], row, strict=False)) for row in whole["past"]]
    assert (published["kind"], published["model"], published["version"]) == ("published", "policy", 1)
    assert set(whole["held"]) <= {"policy/rollout", "policy/trainer"}, "noted every few seconds"
    for table in ("server", "models", "versions", "replicas", "hosts"):
        (names,) = {len(row) for row in whole[table].values()}
        assert names == len(named[table]), table
    assert {len(row) for row in whole["events"]} == {named["events"].index("waited")}, "these are of stalls alone"

    quiet = quiet_after(server.address, first["next"])

    with trainer.mutating(version=2):
        pass
    rollout.update(2)
    (patch,) = changes(server.address, quiet)["patches"]
    row = dict(zip(named["replicas"], patch["set"]["replicas"]["policy/rollout"], strict=True))
    assert (row["has"], row["states"], row["site"]) == (2, {"holding": 1}, "b")
    assert set(patch["set"]["replicas"]) == {"policy/rollout", "policy/trainer"}
    assert patch["set"]["versions"]["policy/2"][-2] == {"b": 8000}, "bytes into b from another site"
    kinds = [event[2] for event in patch["events"]]
    assert [kind for kind in kinds if kind != "offloaded"] == ["published", "read_finished"]

    rollout.close()
    changed = lambda name: [patch[name].get("replicas") for patch in changes(server.address, quiet)["patches"]]  # noqa: E731
    eventually(lambda: ["policy/rollout"] in changed("gone"), "the row of the rollout goes")
    for odd in ("", "1-1", first["next"] + "0", "x", "-", "é", f"{quiet.split('-')[0]}-²"):
        assert "whole" in changes(server.address, urllib.request.quote(odd)), "what we do not know, or have no more"


def test_names_are_data(server):
    """A replica's name with markup is refused, and the refusal shows it; a host or a site may be called so."""

    async def talk():
        named = replace(hello(replica="a"), host=MARKUP, site=MARKUP)
        async with (
            line_to(server.address, named, Report(1)) as line,
            line_to(server.address, hello(replica=MARKUP)) as bad,
        ):
            await line.receive(timeout=5)
            await bad.receive(timeout=5)
            return await asyncio.to_thread(fetch, server.address, "/v1/dashboard")

    status, headers, text = asyncio.run(talk())
    assert (status, headers["Content-Type"]) == (200, "application/json")
    whole = json.loads(text)["whole"]
    assert [row[:2] for row in whole["hosts"].values()] == [[MARKUP, MARKUP]]
    assert MARKUP in whole["events"][-1][7] or MARKUP in whole["events"][-2][7]


def test_pages_share_looks_and_none_is_kept_waiting_by_a_server_that_stops(server):
    assert "whole" in changes(server.address)
    cursor = changes(server.address)["next"]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: changes(server.address, cursor), range(4)))
        assert {answer["next"] for answer in answers} == {cursor[:-1] + str(int(cursor[-1]) + 1)}
        waiting = threads.submit(fetch, server.address, f"/v1/dashboard?after={answers[0]['next']}")
        eventually(lambda: server._server.shell._dashboard._looking is not None, "the page waits")
        with within(3):
            server.close()
        assert waiting.result()[0] == 503
