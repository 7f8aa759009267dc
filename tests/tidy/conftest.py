"""What the checkers parse is let go when they are done."""

from collections.abc import Iterator

import pytest

from .sources import comments_of, sources


@pytest.fixture(scope="package", autouse=True)
def parsed() -> Iterator[None]:
    """Two million objects, which every later collection of the process would look at."""
    yield
    for each in (sources, comments_of):
        each.cache_clear()
