"""What is published from `tensorhub.empty` is mapped by readers of the same host, and written to as any tensor."""

import logging

import numpy as np
import pytest

import tensorhub
from tensorhub.transport import sealed

pytestmark = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")


def test_it_is_mapped_and_may_be_written_to_after_the_drain(join, caplog):
    torch = pytest.importorskip("torch")
    caplog.set_level(logging.INFO)
    theirs = {f"w{index}": tensorhub.empty((300, 1000)) for index in range(20)}
    trainer, _ = join("t", tensors=theirs)
    mine = {name: np.zeros((300, 1000), dtype=np.float32) for name in theirs}
    reader, _ = join("r", tensors=mine)
    for version in (1, 2, 3):
        with trainer.mutating(version=version):
            for index, tensor in enumerate(theirs.values()):
                tensor.copy_(torch.full((300, 1000), 100.0 * version + index))
        assert reader.update("latest") == version
        assert all((array == 100 * version + index).all() for index, array in enumerate(mine.values()))
    ways = [record.getMessage() for record in caplog.records if " by local" in record.getMessage()]
    assert len(ways) == 3
    assert all("(mapped" in way for way in ways)
