"""Masters in one dtype, published in another: what torch would give, in the layout that such tensors would have."""

import mmap
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub.memory import cast, describe, host_memory
from tensorhub.memory.cast import FORMS, PART_ELEMENTS, Casts, keeps_all
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.errors import Closed, HostMemoryFull, UsageError
from tensorhub.protocol.layout import Box

from .kit import Views, image_of, views_of_storages

# --- Masters in one dtype, published in another: what torch would give, in the layout that such tensors would have.


DTYPES = list(FORMS)
fast = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def casts_of(registration: Registration) -> Casts:
    assert registration.casts is not None
    return registration.casts


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def noise(size: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, and every special one."""
    made = np.random.default_rng(seed)
    numbers = made.standard_normal(size) * np.exp2(made.integers(-150, 129, size))
    numbers[: size // 8] = made.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.9, 65520.0, 3.39e38], size // 8)
    return torch.from_numpy(numbers).to(torch_dtype(dtype))


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but that NaN is NaN."""
    assert one.dtype == other.dtype
    mine, theirs = one.double(), other.double()
    is_nan = mine.isnan() & theirs.isnan()
    is_equal = (mine == theirs) & (mine.signbit() == theirs.signbit())
    return bool((is_nan | is_equal).all())


def published(registration: Registration, name: str, image: bytes) -> torch.Tensor:
    """What readers get of a tensor, flat, in the order of memory."""
    spec = next(spec for spec in registration.layout.tensors if spec.name == name)
    data = bytearray(image[spec.offset_bytes : spec.offset_bytes + spec.size_bytes])
    dtype = torch_dtype(spec.dtype)
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_cast_is_torchs(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "PART_ELEMENTS", 20_000)
    given_ = noise(21_001, source)
    registration = register({"w": given_}, dtype=target)
    if source == target:
        assert registration.casts is None
        return
    casts_of(registration).fill()
    expected = given_.to(torch_dtype(target))
    assert same_numbers(published(registration, "w", image_of(registration)), expected)
    if keeps_all(target, source):
        given_.zero_()
        casts_of(registration).give_back()
        assert same_numbers(given_, expected.to(torch_dtype(source)))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", [name for name in DTYPES if FORMS[name].size_bytes < 4])
def test_what_keeps_all_numbers_is_so_of_every_one(source: str, target: str) -> None:
    size = FORMS[source].size_bytes
    every = torch.arange(1 << 8 * size, dtype=torch.int32).to(torch.uint8 if size == 1 else torch.uint16)
    numbers = every.view(torch_dtype(source))
    there_and_back = numbers.to(torch_dtype(target)).to(torch_dtype(source))
    assert keeps_all(source, target) == same_numbers(numbers, there_and_back)


@pytest.mark.parametrize(("source", "target"), sorted(cast.AS_TORCH))
def test_numpy_rounds_as_torch_does_where_it_is_taken(source: str, target: str) -> None:
    given_ = noise(300_001, source)
    ours = torch.empty(len(given_), dtype=torch_dtype(target))
    cast._by_numpy(source, target)(memoryview(given_.numpy()).cast("B"), memoryview(ours.numpy()).cast("B"))
    assert same_numbers(ours, given_.to(torch_dtype(target)))


def viewed(storages: list[torch.Tensor], views: Views) -> dict[str, torch.Tensor]:
    found = {}
    for index, (storage, start, stop, is_transposed) in enumerate(views):
        view = storages[storage][start:stop]
        found[f"t{index}"] = view.view(2, -1).t() if is_transposed and len(view) % 2 == 0 else view
    return found


@fast
@given(views_of_storages(), st.sampled_from(["bfloat16", "float16", "float64"]), st.integers(0, 99))
def test_layout_and_bytes_are_those_of_tensors_of_that_dtype(
    made: tuple[list[int], Views], target: str, seed: int
) -> None:
    """Tied, overlapping, transposed and empty ones among them."""
    sizes, views = made
    storages = [torch.randn(size, generator=torch.Generator().manual_seed(seed + size)) for size in sizes]
    registration = register(viewed(storages, views), dtype=target)
    theirs = register(viewed([storage.to(torch_dtype(target)) for storage in storages], views))
    assert registration.layout_digest == theirs.layout_digest
    casts = registration.casts
    if casts is None:
        assert registration.size_bytes == 0
        return
    casts.fill()
    assert image_of(registration) == image_of(theirs)
    assert build_manifest(registration, 64).root() == build_manifest(theirs, 64).root()
    before = [storage.clone() for storage in storages]
    for storage in storages:
        storage.zero_()
    if target == "float64":
        assert "cannot hold every number" in casts.why_not_back
        return
    casts.give_back()
    covered = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    for storage, start, stop, _ in views:
        covered[storage][start:stop] = True
    for storage, old, is_ours in zip(storages, before, covered, strict=True):
        assert torch.equal(storage, torch.where(is_ours, old.to(torch_dtype(target)).float(), 0))


def test_numpy_masters_with_torchs_dtypes() -> None:
    array = np.linspace(-1, 1, 1001, dtype=np.float32)
    registration = register({"w": array}, dtype="bfloat16")
    casts_of(registration).fill()
    assert torch.equal(published(registration, "w", image_of(registration)), torch.from_numpy(array).bfloat16())
    assert register({"w": array}, dtype=np.float16).layout.tensors[0].dtype == "float16"
    assert register({"w": array}, dtype=np.dtype("float64")).layout.tensors[0].dtype == "float64"


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("int8", "dtype='int8' is none that can be cast to"),
        (torch.complex64, "none that can be cast to"),
        (7, "dtype=7 is none"),
        ({"v": "bfloat16"}, "dtype names tensor 'v', which is not among those to register"),
        ({"steps": "bfloat16"}, "tensor 'steps' of int64 cannot be cast to bfloat16"),
        ({"w": "bf16"}, "dtype='bf16' is none"),
        ({"w": "bfloat16"}, "share memory, and cannot be cast apart"),
    ],
)
def test_what_cannot_be_cast_is_named(dtype: object, text: str) -> None:
    w = torch.randn(8)
    with pytest.raises(UsageError, match=text):
        register({"w": w, "tied": w[4:], "steps": torch.arange(4)}, dtype=dtype)


def test_masters_that_moved_are_named_and_what_is_published_has_not() -> None:
    tensors = {"w": torch.randn(8), "v": torch.randn(8)}
    registration = register(tensors, dtype={"w": "bfloat16"})
    tensors["w"].data = torch.randn(8)
    assert registration.moved() == []
    assert casts_of(registration).moved() == ["w"]


def test_a_master_that_is_freed_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Cut short, for what is given back to an allocator may be there all the same."""
    path = tmp_path / "master"
    path.write_bytes(bytes(4 << 20))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4 << 20)
    tensors = {"w": np.frombuffer(memory, np.float32), "v": np.zeros(8, np.float32)}
    registration = register(tensors, dtype="bfloat16")
    os.truncate(path, 0)
    with pytest.raises(UsageError, match="freed while they were cast: 'w'"):
        casts_of(registration).fill()
    with pytest.raises(UsageError, match="freed while they were cast: 'w'"):
        casts_of(registration).give_back()


def test_no_room_for_the_buffer_is_an_error_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host_memory.Footing.__init__, "__defaults__", (lambda: host_memory.Room(200 << 20, "a limit"), 96 << 20)
    )
    master = torch.empty(64 << 20)  # never touched
    with pytest.raises(HostMemoryFull, match=r"the buffer in which tensors are published.*needs 128 MiB more") as found:
        register({"w": master}, dtype="bfloat16")
    assert "name only some tensors in dtype=" in str(found.value.hint)
    register({"w": master[: 16 << 20]}, dtype="bfloat16")


def test_a_cast_that_is_given_up_ends_at_its_next_piece_and_closing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registration = register({"w": torch.zeros(4 * PART_ELEMENTS)}, dtype="bfloat16")
    casts = casts_of(registration)
    begun, go_on, looks = threading.Event(), threading.Event(), []
    real = cast.copy

    def slowly(*arguments: object) -> None:
        begun.set()
        assert go_on.wait(20)
        real(*arguments)  # type: ignore[arg-type]

    def is_over() -> bool:
        looks.append(1)
        return len(looks) > 2

    monkeypatch.setattr(cast, "copy", slowly)
    ended: list[Exception] = []

    def fill() -> None:
        try:
            casts.fill(is_over)
        except Closed as error:
            ended.append(error)

    filling, closing = threading.Thread(target=fill), threading.Thread(target=casts.close)
    filling.start()
    assert begun.wait(20)
    closing.start()
    assert not ended
    assert closing.is_alive()
    go_on.set()
    closing.join(20)
    filling.join(20)
    assert len(ended) == 1
    assert not closing.is_alive()


def test_without_torch_numpy_casts_what_it_rounds_alike_and_says_what_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(describe, "_why_not", "")
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    array = np.array([1.0, 65520.0, 3.14159], np.float32)
    registration = register({"w": array}, dtype="float16")
    casts_of(registration).fill()
    assert image_of(registration) == np.array([1.0, np.inf, 3.14159], np.float16).tobytes()
    with pytest.raises(UsageError, match="casting float32 to bfloat16 needs torch, which is not installed") as refused:
        register({"w": array}, dtype="bfloat16")
    assert "float32 to float16" in (refused.value.hint or "")


def test_what_is_in_no_box_is_not_given_back() -> None:
    """Padding at the end, between rows, and a tensor of which nothing takes part keep every bit of theirs."""
    tensors = {
        "rows": torch.full((70, 16), 1 / 3),
        "columns": torch.full((40, 19), 1 / 3),
        "none": torch.full((5,), 1 / 3),
        "whole": torch.full((3, 5), 1 / 3),
    }
    boxes = {
        "rows": [Box("rows", (64, 16), (0, 0), (64, 16))],
        "columns": [Box("columns", (40, 16), (0, 0), (40, 16), 2, (19, 1))],
        "none": [],
    }
    registration = register(tensors, "bfloat16", boxes)
    with registration.stream.views_to_write(0, registration.size_bytes) as views:
        for view in views:
            view[:] = b"\x80\x3f" * (len(view) // 2)  # ones
    casts_of(registration).give_back()
    for name, inside in (("rows", np.s_[:64]), ("columns", np.s_[:, 2:18]), ("none", np.s_[:0]), ("whole", np.s_[:])):
        expected = torch.full_like(tensors[name], 1 / 3)
        expected[inside] = 1
        assert torch.equal(tensors[name], expected), name
