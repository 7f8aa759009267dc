"""A cluster of real processes for each test, and one line of figures for each scenario at the end."""

import pytest

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
def figures(record_property):
    """`figures("line", name=value)` keeps the figures of a scenario and prints its line at the end of the run."""

    def keep(line, **values):
        for name, value in values.items():
            record_property(name, value)
        record_property("line", line)  # printed by the root's conftest

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.has_failed = getattr(item, "has_failed", False) or report.failed
    return report
