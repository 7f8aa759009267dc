"""What every test shares: the same order, the same choices of hypothesis in CI, and none of the caller's settings.

`make test` runs several tests at a time (pytest-xdist), each in one of a few processes. What a test counts (threads,
descriptors, memory, garbage) is its own process's or its own children's, so others do not disturb it.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)  # a red run is red again
settings.load_profile("ci" if os.environ.get("CI") else "dev")

FIRST = ("tests/tidy/",)  # seconds, and they explain what others only suffer from
WAITING = "processes"  # the mark of tests with real processes: they wait while others compute

# What is blessed; by which of two ways bytes move in these tests; how large models are that are cut in several ways.
KEPT = ("TENSORHUB_BLESS", "TENSORHUB_NATIVE", "TENSORHUB_TEST_MODEL")
for name in [name for name in os.environ if name.startswith("TENSORHUB_") and name not in KEPT]:
    del os.environ[name]  # here, so that subprocesses of tests do not see them either
STATE_DIR = os.environ["TENSORHUB_STATE_DIR"] = tempfile.mkdtemp(prefix="tensorhub-state-")  # nobody's own token


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run tests marked long, too, as `make test-all` does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked long are left out, unless asked for. Those with processes are spread evenly among the others."""
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]

    kinds: tuple[list[pytest.Item], ...] = ([], [], [])
    for item in items:
        is_first, waits = item.nodeid.startswith(FIRST), item.get_closest_marker(WAITING)
        kinds[0 if is_first else 2 if waits else 1].append(item)
    places = {item: at / len(its) for its in kinds[1:] for at, item in enumerate(its)}
    items[:] = kinds[0] + sorted(kinds[1] + kinds[2], key=places.__getitem__)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there before the first test stays, and no collection looks at it: with torch that takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_auto_num_workers() -> int:
    """How many `-n auto` means: two for each core, since most tests with real processes wait for them."""
    return 2 * min(4, len(os.sched_getaffinity(0)))


def pytest_unconfigure() -> None:
    shutil.rmtree(STATE_DIR, ignore_errors=True)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is there in such a test is held by somebody, and what is held in a circle stays."""
    gc.disable()
    yield
    gc.enable()
