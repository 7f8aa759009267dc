"""A cluster of real processes for each test, or a server for a program of its own."""

import pytest

import tensorhub

from .cluster import Cluster
from .process import WorkerPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Worker processes, from one scenario to the next."""
    found = WorkerPool(tmp_path_factory.mktemp("workers"))
    yield found
    found.close()


@pytest.fixture
def start(request, tmp_path, pool):
    """`start(lease_s=2)` starts the scenario's server. Afterwards everybody must be able to leave in order."""
    started = []

    def begin(**options):
        started.append(Cluster(request.node.name, tmp_path, pool, **options))
        return started[-1]

    yield begin
    try:
        if not getattr(request.node, "has_failed", False):
            for cluster in started:
                cluster.close()
    finally:
        for cluster in started:
            cluster.end()


@pytest.fixture
def server():
    """A reference server in this process, for programs of `script.run`."""
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.has_failed = getattr(item, "has_failed", False) or report.failed
    return report
