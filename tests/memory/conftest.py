"""What several tests of tensors need."""

from collections.abc import Callable

import pytest

from tensorhub.memory.registration import Registration
from tensorhub.transport.base import ByteStream

from .kit import image_of, put_into


@pytest.fixture
def image() -> Callable[[Registration], bytes]:
    """All bytes of a registration's stream."""
    return image_of


@pytest.fixture
def put() -> Callable[[ByteStream, int, bytes], None]:
    """Write bytes into a stream from an offset on."""
    return put_into
