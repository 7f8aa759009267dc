"""What the tests of the native mover share: the library, or the reason why it is not tested here."""

import pytest

from tensorhub.transport.native import load

needs_mover = pytest.mark.skipif(load.library() is None, reason=f"no native mover: {load.why_not()}")


def library() -> load.Library:
    found = load.library()
    assert found is not None
    return found
