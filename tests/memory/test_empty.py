"""Tensors in memory that readers map, and memory for a layout that another process registered."""

import gc
import mmap
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.memory import host_memory as module
from tensorhub.memory.host_memory import allocate, empty, empty_like
from tensorhub.memory.registration import register
from tensorhub.protocol.errors import HostMemoryFull, Unavailable, UsageError
from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.transport import sealed
from tensorhub.transport.ranges import bare_addresses
from tensorhub.transport.sealed import Unmappable, regions_of

# --- Tensors in memory that can be mapped: what they are, where they lie, and what is no shape or dtype.


needs_sealed = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")


def regions(tensors):
    addresses = bare_addresses(register(tensors).stream)
    assert addresses is not None
    return regions_of(addresses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_it_is_an_ordinary_tensor_that_begins_at_a_page(dtype):
    found = empty((3, 5, 7), dtype)
    assert (found.shape, found.dtype, found.device.type) == ((3, 5, 7), dtype, "cpu")
    assert found.is_contiguous()
    assert found.data_ptr() % mmap.PAGESIZE == 0
    found.view(torch.uint8).fill_(1)
    again = empty_like(found)
    assert (again.shape, again.dtype) == (found.shape, dtype)
    assert again.data_ptr() % mmap.PAGESIZE == 0
    assert not again.view(torch.uint8).any(), "it does not lie in the first one"
    parameter = torch.nn.Parameter(empty((4,)))
    parameter.sum().backward()


@pytest.mark.parametrize("shape", ["3", (3, -1), (2.0,), (True,), None, (1,) * 65])
def test_what_is_no_shape_is_named(shape):
    with pytest.raises(UsageError, match="shape="):
        empty(shape)


@pytest.mark.parametrize("dtype", ["float33", object(), None, "Tensor"])
def test_what_is_no_dtype_is_named(dtype):
    with pytest.raises(UsageError, match="dtype="):
        empty(3, dtype)


def test_too_much_is_refused():
    with pytest.raises(HostMemoryFull, match="would take"):
        empty((1 << 30, 1 << 30))
    with pytest.raises(UsageError, match="not a list"):
        empty_like([1.0])


def test_arrays_are_of_numpy(monkeypatch):
    like = empty_like(np.zeros((2, 3), dtype=np.int16))
    assert isinstance(like, np.ndarray)
    assert (like.shape, like.dtype, like.ctypes.data % mmap.PAGESIZE) == ((2, 3), np.int16, 0)
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    found = empty((2, 3), "float64")
    assert isinstance(found, np.ndarray)
    found[:] = 1
    with pytest.raises(UsageError, match="dtype="):
        empty(3, "bfloat33")


@needs_sealed
def test_many_tensors_lie_in_few_regions_which_are_given_back_with_the_last():
    before = len(sealed._all)
    found = {f"w{index}": empty((1000,)) for index in range(100)}
    assert len(regions(found)) <= 2
    kept = found.popitem()[1]
    kept.fill_(3)
    del found
    gc.collect()
    assert (kept == 3).all()
    del kept
    gc.collect()
    assert len(sealed._all) <= before


@needs_sealed
def test_a_forked_child_gives_out_other_memory():
    mine = empty((8,))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        theirs = empty((8,))
        theirs.fill_(9)
        os.write(write, b"x")
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.waitpid(child, 0)
    following = empty((8,))
    mine.fill_(1)
    assert not (following == 9).any()


def test_without_such_memory_it_lies_in_ordinary_memory(monkeypatch):
    def refused(*_, **__):
        raise Unmappable("no memfd_create")

    monkeypatch.setattr(module, "Sealed", refused)
    monkeypatch.setattr(module, "_arenas", module.Arenas())
    found = empty((3, 3))
    found.fill_(2)
    assert found.data_ptr() % mmap.PAGESIZE == 0
    assert not regions({"w": found})


@needs_sealed
def test_memory_that_was_given_back_asks_for_no_more_than_the_first(monkeypatch):
    """It grew twofold with each that died, to 64 TiB, of which a reader can map one."""
    arenas = module.Arenas()
    monkeypatch.setattr(module, "_arenas", arenas)
    for _ in range(5):
        tensor = empty(1000)
        assert arenas.size_bytes == module.ARENA_BYTES
        del tensor
    kept = empty(1000), empty(module.ARENA_BYTES // 4)  # which has no room behind the first
    assert arenas.size_bytes == 2 * module.ARENA_BYTES
    del kept


# --- Memory for a layout that somebody else has registered: registered anew it has the same digest.


LAYOUT_DTYPES = (torch.uint8, torch.int16, torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool)


@st.composite
def several(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of their own, and overlapping views of one storage in several dtypes."""
    found: dict[str, torch.Tensor] = {}
    storage = torch.zeros(256, dtype=torch.uint8)
    for index in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(LAYOUT_DTYPES))
        if draw(st.booleans()):
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            tensor = torch.zeros(shape, dtype=dtype)
            found[f"t{index}"] = tensor.permute(draw(st.permutations(range(len(shape)))))
        else:
            size = dtype.itemsize
            start = draw(st.integers(0, 256 // size - 1))
            length = draw(st.integers(1, 256 // size - start))
            found[f"t{index}"] = storage[start * size : (start + length) * size].view(dtype)
    return found


@settings(max_examples=30)
@given(several())
def test_it_has_the_same_digest_and_as_many_bytes(tensors: dict[str, torch.Tensor]) -> None:
    layout = register(tensors).layout
    made = register(allocate(layout))
    assert made.layout == layout
    assert made.layout_digest == layout.digest()


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["uint8", "int16", "float32", "complex128"]), min_size=1, max_size=5))
def test_numpy_where_there_is_no_torch(dtypes: list[str]) -> None:
    layout = register({f"t{n}": np.zeros((n + 1, 3), dtype) for n, dtype in enumerate(dtypes)}).layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "loaded_torch", lambda: None)
        made = allocate(layout)
    assert all(isinstance(each, np.ndarray) for each in made.values())
    assert register(made).layout == layout


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_a_dtype_that_is_unknown_here_names_the_tensor(monkeypatch: pytest.MonkeyPatch, torch_is_there: bool) -> None:
    if not torch_is_there:
        monkeypatch.setattr(module, "loaded_torch", lambda: None)
    layout = Layout((TensorSpec("w", "float3", (4,), (1,), 0, 4),), 4)
    with pytest.raises(UsageError, match="'w': float3"):
        allocate(layout)


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_no_memory_is_no_riddle(monkeypatch: pytest.MonkeyPatch, torch_is_there: bool) -> None:
    if not torch_is_there:
        monkeypatch.setattr(module, "loaded_torch", lambda: None)
    most = 2**61
    with pytest.raises(Unavailable, match=f"1 tensors of {most} B could not be allocated"):
        allocate(Layout((TensorSpec("w", "uint8", (most,), (1,), 0, most),), most))
