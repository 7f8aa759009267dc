"""Stories of weights on a device: told on the host too, so that one which cannot pass anywhere is seen without one."""

import pytest
import torch

import tensorhub
from api.conftest import server

__all__ = ["server"]

CUDA = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    ],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    """Where the tensors of the story are."""
    return request.param


@pytest.fixture
def join(server):
    """`join(replica, tensors, **of_register)` opens a worker that has registered them."""
    opened = []

    def joined(replica, tensors, *, dtype=None, boxes=None, **options):
        options = {"timeout": 30, "call_timeout": 60} | options
        weights = tensorhub.open("m", replica=replica, server=server.address, **options)
        opened.append(weights)
        weights.register(tensors, dtype=dtype, boxes=boxes)
        return weights

    yield joined
    for weights in reversed(opened):
        weights.close(timeout=5)
