"""A server, and jobs of several ranks."""

import pytest

import tensorhub

from .kit import Job


@pytest.fixture
def running():
    with tensorhub.serve(lease_s=2.0, report_s=0.25) as found:
        yield found


@pytest.fixture
def server(running):
    """Its address."""
    return running.address


@pytest.fixture
def start(server, tmp_path):
    """`start(3)` starts a job of three ranks."""
    jobs = []

    def begin(ranks=3):
        jobs.append(Job(ranks, server, tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()
