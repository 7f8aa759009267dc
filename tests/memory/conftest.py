"""What several tests of tensors need."""

from collections.abc import Callable

import pytest

from tensorhub.memory.registration import Registration
from tensorhub.transport.base import ByteStream


def image_of(registration: Registration) -> bytes:
    with registration.stream.reading(0, registration.size_bytes) as views:
        return b"".join(views)


def put_into(stream: ByteStream, start: int, data: bytes) -> None:
    with stream.writing(start, start + len(data)) as views:
        at = 0
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
    assert at == len(data)


@pytest.fixture
def image() -> Callable[[Registration], bytes]:
    """All bytes of a registration's stream."""
    return image_of


@pytest.fixture
def put() -> Callable[[ByteStream, int, bytes], None]:
    """Write bytes into a stream from an offset on."""
    return put_into
