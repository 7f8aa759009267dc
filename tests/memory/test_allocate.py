"""Memory for a layout that somebody else has registered: registered anew it has the same digest."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.memory import empty
from tensorhub.memory.empty import allocate
from tensorhub.memory.registration import register
from tensorhub.protocol.errors import Unavailable, UsageError
from tensorhub.protocol.manifest import Layout, TensorSpec

DTYPES = (torch.uint8, torch.int16, torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool)


@st.composite
def several(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of their own, and overlapping views of one storage in several dtypes."""
    found: dict[str, torch.Tensor] = {}
    storage = torch.zeros(256, dtype=torch.uint8)
    for index in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
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


@given(several())
def test_it_has_the_same_digest_and_as_many_bytes(tensors: dict[str, torch.Tensor]) -> None:
    layout = register(tensors).layout
    made = register(allocate(layout))
    assert made.layout == layout
    assert made.layout_digest == layout.digest()


@given(st.lists(st.sampled_from(["uint8", "int16", "float32", "complex128"]), min_size=1, max_size=5))
def test_numpy_where_there_is_no_torch(dtypes: list[str]) -> None:
    layout = register({f"t{n}": np.zeros((n + 1, 3), dtype) for n, dtype in enumerate(dtypes)}).layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(empty, "loaded_torch", lambda: None)
        made = allocate(layout)
    assert all(isinstance(each, np.ndarray) for each in made.values())
    assert register(made).layout == layout


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_a_dtype_that_is_unknown_here_names_the_tensor(monkeypatch: pytest.MonkeyPatch, torch_is_there: bool) -> None:
    if not torch_is_there:
        monkeypatch.setattr(empty, "loaded_torch", lambda: None)
    layout = Layout((TensorSpec("w", "float3", (4,), (1,), 0, 4),), 4)
    with pytest.raises(UsageError, match="'w': float3"):
        allocate(layout)


def test_what_no_memory_could_be_aligned_to() -> None:
    specs = (TensorSpec("a", "float32", (2,), (1,), 0, 8), TensorSpec("b", "float32", (1,), (1,), 1, 4))
    with pytest.raises(UsageError, match="aligned to nothing: 'a', 'b'"):
        allocate(Layout(specs, 8))


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_no_memory_is_no_riddle(monkeypatch: pytest.MonkeyPatch, torch_is_there: bool) -> None:
    if not torch_is_there:
        monkeypatch.setattr(empty, "loaded_torch", lambda: None)
    most = 2**61
    with pytest.raises(Unavailable, match=f"1 tensors of {most} B could not be allocated"):
        allocate(Layout((TensorSpec("w", "uint8", (most,), (1,), 0, most),), most))
