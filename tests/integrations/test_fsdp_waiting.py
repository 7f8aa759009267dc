"""How long ranks wait for each other: longer than any call of them, which may still end well, and not for ever.

And how they part: what they have for their votes goes, and nobody's vote is cut off.
"""

import time

import pytest
import torch

import tensorhub
from tensorhub.integrations import fsdp

from .kit import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SHORT_S = 0.5  # in place of WAIT_S and SLACK_S: less than a late call takes
LONG_S = 60


@pytest.fixture
def start(start):
    """`start()` starts a job of two ranks, the second of which holds a copy and only votes."""

    def begin():
        job = start(2)
        job.call("build", kind="ddp")
        return job

    return begin


@pytest.mark.parametrize("said", ["step(timeout=)", "call_timeout=", "TENSORHUB_TIMEOUT_S"])
def test_who_holds_a_copy_waits_for_a_call_as_long_as_it_may_take(start, monkeypatch, said):
    if said == "TENSORHUB_TIMEOUT_S":
        monkeypatch.setenv("TENSORHUB_TIMEOUT_S", str(LONG_S))
    job = start()
    call_s = {"step(timeout=)": 1, "call_timeout=": LONG_S}.get(said)
    job.call("attach", model="policy", wait_s=SHORT_S, call_timeout=call_s)
    step_s = LONG_S if said == "step(timeout=)" else None
    assert job.call("step", version=1, fails=0, then="late", timeout=step_s) == 1
    assert job.call("step", version=2) == 2


def test_a_rank_that_was_waited_for_in_vain_is_not_called_gone(start):
    job = start()
    job.call("attach", model="policy", wait_s=SHORT_S)
    found = job.answers("step", version=1, fails=0, then="late", timeout=SHORT_S)
    assert [each.get("code") for each in found] == ["group-incomplete"] * 2, found
    assert "timed out: another rank did not come to an end within 1 s" in found[1]["message"]
    assert "another rank is gone, or has waited too long for this one" in found[0]["message"]
    again = job.answers("step", version=1)
    assert [each.get("code") for each in again] == ["group-incomplete"] * 2, "no vote can be held any more"
    assert "timed out" in again[1]["message"]


MANY, OF_ONE = 4, 3  # attachments; threads of a gloo group


@pytest.mark.parametrize("fails", [None, 0])
def test_an_attachment_that_has_ended_leaves_no_threads(start, fails):
    job = start()
    job.call("attach", model="policy")  # with it begins what a process has once
    job.call("close")
    before = job.answers("threads")
    for _ in range(MANY):
        if fails is None:
            job.call("attach", model="policy")
            job.call("close")
        else:
            found = job.answers("attach", model="policy", fails=fails, then="open")
            assert [each.get("code") for each in found] == ["usage", "group-incomplete"], found

    def are_few():
        pairs = zip(job.answers("threads"), before, strict=True)
        return all(now["value"] < then["value"] + OF_ONE for now, then in pairs)

    eventually(are_few, f"the threads of {MANY} attachments are gone")
    assert job.call("attach", model="policy") is not None


def test_who_closes_cuts_off_no_vote_that_another_rank_has_yet_to_hold(start, tmp_path):
    """It hears why its step has failed, and only in the next one that it is alone."""
    job = start()
    job.call("attach", model="policy", wait_s=20)
    closed = tmp_path / "closed"
    for rank in (0, 1):
        job.tell(rank, "step", version=1, fails=0, until=str(closed))
    assert job.heard(0)["code"] == "ValueError"
    job.tell(0, "close")
    assert "value" in job.heard(0)
    closed.touch()
    assert "another rank raised" in job.heard(1)["message"]
    job.tell(1, "step_alone")
    found = job.heard(1)
    assert found["code"] == "group-incomplete"
    assert "another rank has left" in found["message"]
    job.tell(1, "close")
    assert "value" in job.heard(1)


def test_the_timeout_of_an_attachment_is_also_for_its_questions(monkeypatch):
    """A rank that fails in one tells the others, who wait for it no longer than that."""
    monkeypatch.setenv("TENSORHUB_CONNECT_S", str(LONG_S))
    began = time.monotonic()
    with pytest.raises(tensorhub.ServerUnreachable):
        fsdp.attach(torch.nn.Linear(2, 2), "policy", server="127.0.0.1:1", timeout=SHORT_S)
    assert time.monotonic() - began < LONG_S / 2
