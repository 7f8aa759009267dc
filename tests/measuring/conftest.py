"""What every test of the benchmarks shares."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """The benchmarks collect garbage before they count: without all that other tests have left in this process."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
