"""How long ranks wait for each other: longer than any call of them, which may still end well, and not for ever."""

import pytest

import tensorhub

from .kit import Job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SHORT_S = 0.5  # in place of WAIT_S and SLACK_S: less than a late call takes
LONG_S = 60


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2.0, report_s=0.25) as found:
        yield found.address


@pytest.fixture
def start(server, tmp_path):
    """`start()` starts a job of two ranks, the second of which holds a copy and only votes."""
    jobs = []

    def begin():
        jobs.append(Job(2, server, tmp_path))
        jobs[-1].call("build", kind="ddp")
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


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
