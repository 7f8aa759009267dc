"""Registering tensors: which byte comes where, which layouts are equal, and what is refused in which words."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tensorhub.memory.describe import Described
from tensorhub.memory.registration import Registration, place, register
from tensorhub.memory.streams import HostStream
from tensorhub.protocol.errors import UsageError

from .kit import Views, image_of, put_into, views_of_storages

# --- Registering tensors: which byte comes where, which layouts are equal, and what is refused in which words.


DTYPES = sorted(
    (
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    ),
    key=str,
)
NUMPY_DTYPES = ["bool", "float16", "float32", "float64", "complex64", "complex128"] + [
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
]


def offsets(registration: Registration) -> dict[str, int]:
    return {spec.name: spec.offset_bytes for spec in registration.layout.tensors}


def random_bytes(size_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_torch_dtype_crosses_bit_for_bit(dtype: torch.dtype) -> None:
    """All byte patterns, so also NaNs with a payload, negative zeros and denormals."""
    given = bytes(range(256)) * 8 + random_bytes(1024)
    source = torch.frombuffer(bytearray(given), dtype=torch.uint8).view(dtype)
    target = torch.zeros(len(given), dtype=torch.uint8).view(dtype)
    here, there = register({"w": source}), register({"w": target})
    assert here.layout.tensors[0].dtype == str(dtype).removeprefix("torch.")
    assert image_of(here) == given
    put_into(there.stream, 0, image_of(here))
    assert bytes(target.view(torch.uint8).numpy()) == given
    assert here.layout.digest() == there.layout.digest()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_and_torch_have_one_name_for_a_dtype(dtype: str) -> None:
    array = np.frombuffer(bytearray(random_bytes(160) if dtype != "bool" else bytes([0, 1] * 80)), dtype=dtype)
    tensor = torch.zeros(array.shape, dtype=getattr(torch, dtype))
    here, there = register({"w": array}), register({"w": tensor})
    assert here.layout.tensors[0].dtype == dtype
    assert here.layout.digest() == there.layout.digest()
    assert image_of(here) == array.tobytes()


def test_a_parameter_that_requires_grad_is_read_and_written_without_autograd() -> None:
    linear = torch.nn.Linear(3, 5)
    registration = register(dict(linear.named_parameters()))
    put_into(registration.stream, 0, bytes(registration.size_bytes))
    assert torch.equal(linear.weight, torch.zeros(5, 3))
    assert linear.weight.requires_grad
    assert linear.weight.grad_fn is None
    with torch.inference_mode():
        made_there = torch.ones(2)
    assert image_of(register({"w": made_there})) == bytes(made_there.numpy())


def test_tied_weights_cost_once() -> None:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    registration = register({"embed": weight, "norm": torch.ones(1), "head": weight, "head_t": weight.t()})
    assert offsets(registration) == {"embed": 0, "norm": 24, "head": 0, "head_t": 0}
    assert registration.size_bytes == 28
    untied = register({"embed": weight, "norm": torch.ones(1), "head": weight.clone(), "head_t": weight.t()})
    assert untied.layout.digest() != registration.layout.digest()


@pytest.mark.parametrize("order", ["qkv", "vqk", "kvq"])
def test_views_of_a_fused_storage_lie_as_separate_tensors_do(order: str) -> None:
    fused = torch.randn(12, 4)
    views = {"q": fused[:6], "k": fused[6:9], "v": fused[9:]}
    together = register({name: views[name] for name in order})
    apart = register({name: views[name].clone() for name in order})
    assert together.layout == apart.layout
    assert image_of(together) == image_of(apart)
    assert len(apart.pieces) == 3
    assert len(together.pieces) == (1 if order == "qkv" else 2)


def facts(name: str, address: int, size_bytes: int, device: str = "cpu", storage: int = 0) -> Described:
    return Described(name, "uint8", (size_bytes,), (1,), address, size_bytes, device, storage, None)


def test_equal_addresses_on_different_devices_are_different_memory() -> None:
    on_first = [facts("b", 150, 100, "cuda:0"), facts("d", 170, 10, "cuda:0")]
    on_second = [facts("c", 120, 40, "cuda:1"), facts("e", 170, 10, "cuda:1")]
    offsets, pieces = place([*on_first, facts("a", 100, 100), *on_second])
    assert offsets == [0, 20, 100, 200, 240]
    assert [(piece.device, piece.address, piece.size_bytes) for piece in pieces] == [
        ("cuda:0", 150, 100),
        ("cpu", 100, 100),
        ("cuda:1", 120, 40),
        ("cuda:1", 170, 10),
    ]


def test_neighbours_become_one_piece_only_inside_one_allocation() -> None:
    offsets, pieces = place(
        [facts("a", 100, 10, storage=1), facts("b", 110, 10, storage=1), facts("c", 120, 5, storage=2)]
    )
    assert offsets == [0, 10, 20]
    assert [(piece.address, piece.start, piece.stop) for piece in pieces] == [(100, 0, 20), (120, 20, 25)]


def test_strides_that_mean_nothing_make_no_difference() -> None:
    odd = torch.randn(8).as_strided((1, 8, 1), (3, 1, 77))
    assert register({"w": odd}).layout == register({"w": torch.randn(1, 8, 1)}).layout
    assert register({"w": np.zeros((5, 0)).T}).layout == register({"w": torch.zeros(0, 5, dtype=torch.float64)}).layout


def test_memory_lives_as_long_as_the_registration_or_a_view_of_it() -> None:
    array = np.arange(1000, dtype=np.float64)
    alive = weakref.ref(array)
    registration = register({"w": array, "t": torch.arange(1000)})
    expected = array.tobytes()
    with registration.stream.views_to_read(0, 8000) as views:
        view = views[0][8:]
    del array, registration, views
    gc.collect()
    assert alive() is not None
    assert bytes(view) == expected[8:]
    del view
    gc.collect()
    assert alive() is None


def test_tensors_given_other_memory_are_noticed() -> None:
    linear = torch.nn.Linear(3, 5)
    shrunk, array, empty = torch.ones(4), np.ones(4), torch.ones(0)
    registration = register({**dict(linear.named_parameters()), "shrunk": shrunk, "array": array, "empty": empty})
    before = image_of(registration)[:80]
    assert registration.moved() == []
    with torch.no_grad():
        linear.weight += 0
    assert registration.moved() == []
    linear.weight.data = torch.zeros(5, 3)
    assert registration.moved() == ["weight"]
    assert image_of(registration)[:80] == before, "the registered memory is still there"


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3, 4), lambda: np.ones((3, 4), np.float32)], ids=["torch", "numpy"]
)
def test_a_name_of_a_dict_that_means_another_tensor_is_noticed(make: Callable[[], Any]) -> None:
    """`tensors["w"] = tensors["w"] + 1`: what was registered is not what its owner trains from then on."""
    tensors = {"w": make(), "b": make()}
    registration = register(tensors)
    registration.check_in_place("m/t[0]")
    tensors["w"] += 1
    del tensors["b"]
    tensors["new"] = make()
    registration.check_in_place("m/t[0]")
    kept = tensors["w"]
    tensors["w"] = tensors["w"] + 1
    with pytest.raises(
        UsageError, match=r"the dict of m/t\[0\] no longer holds what was registered: 'w' lies in other"
    ):
        registration.check_in_place("m/t[0]")
    tensors["w"] = kept[:, :2]
    with pytest.raises(UsageError, match=r"'w' has shape \[3, 2\] and had \[3, 4\]"):
        registration.check_in_place("m/t[0]")
    tensors["w"] = kept.reshape(3, 4)
    registration.check_in_place("m/t[0]")
    tensors["w"] = None
    with pytest.raises(UsageError, match="'w' is gone"):
        registration.check_in_place("m/t[0]")


class Made(Mapping[str, Any]):
    """Views of one tensor, and another one that is read from somewhere each time."""

    def __init__(self) -> None:
        self.kept = torch.ones(4, 4)

    def __getitem__(self, name: str) -> torch.Tensor:
        return {"view": self.kept[1:3], "read": torch.full((3,), 2.0)}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("view", "read"))

    def __len__(self) -> int:
        return 2


def test_what_a_mapping_makes_anew_each_time_is_not_compared() -> None:
    tensors = Made()
    registration = register(tensors)
    registration.check_in_place("m/t[0]")
    tensors.kept = tensors.kept.clone()
    with pytest.raises(UsageError, match=r"'view' lies in other memory"):
        registration.check_in_place("m/t[0]")


def test_a_storage_that_was_shrunk_is_noticed_and_not_registered() -> None:
    tensor = torch.ones(1000)
    registration = register({"w": tensor})
    tensor.untyped_storage().resize_(0)
    assert registration.moved() == ["w"]
    with pytest.raises(UsageError, match="'w' lies outside of its storage"):
        register({"w": tensor})


def read_only() -> np.ndarray:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


class Wrapper(torch.Tensor):
    """Stands for DTensor and its like: a tensor without memory of its own that intercepts every operation."""

    @staticmethod
    def __new__(cls) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, (4,))  # type: ignore[no-any-return,attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> None:
        raise AssertionError("registration ran an operation on a tensor")


REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("gaps", lambda: torch.zeros(4, 6)[:, ::2], r"strides \[6, 2\]: there are gaps"),
    ("columns", lambda: torch.zeros(4, 6)[:, :3], r"of shape \[4, 3\] has strides \[6, 1\]: there are gaps"),
    ("expanded", lambda: torch.zeros(4, 1).expand(4, 3), r"strides \[1, 0\]: several of its elements share memory"),
    ("window", lambda: torch.zeros(9).as_strided((4, 4), (1, 1)), "several of its elements share memory"),
    ("gaps in numpy", lambda: np.zeros((4, 6))[::2], r"strides \[12, 1\]: there are gaps"),
    ("backwards", lambda: np.zeros(6)[::-1], r"strides \[-1\]: it runs backwards"),
    ("broadcast", lambda: np.lib.stride_tricks.as_strided(np.zeros(3), (4, 3), (0, 8)), "share memory"),
    ("sparse", lambda: torch.eye(3).to_sparse(), r"is sparse \(torch.sparse_coo\)"),
    ("csr", lambda: torch.eye(3).to_sparse_csr(), r"is sparse \(torch.sparse_csr\)"),
    ("quantized", lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8), "is quantized"),
    ("nested", lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "is a nested tensor"),
    ("meta", lambda: torch.zeros(3, device="meta"), "is on the meta device"),
    ("lazy", torch.nn.UninitializedParameter, "is a lazy parameter"),
    ("conjugate", lambda: torch.zeros(3, dtype=torch.complex64).conj(), "is a lazy conjugate"),
    ("negated", lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "is a lazy negation"),
    ("symbolic zero", lambda: torch._efficientzerotensor(3), "is a symbolic zero"),
    ("wrapper", Wrapper, "is a .*Wrapper, whose memory is elsewhere"),
    ("read-only", read_only, "is a read-only numpy array"),
    ("masked", lambda: np.ma.masked_array(np.zeros(3)), "is a masked array"),
    ("objects", lambda: np.array([None, "x"]), "references to objects"),
    ("structured", lambda: np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]), "has the structured dtype"),
    ("foreign byte order", lambda: np.zeros(3, dtype=">f4"), "not in native byte order"),
    ("text", lambda: np.array(["abc"]), "not one that workers can exchange"),
    ("dates", lambda: np.zeros(3, dtype="datetime64[s]"), "not one that workers can exchange"),
    ("long double", lambda: np.zeros(3, dtype=np.longdouble), "not one that workers can exchange"),
    ("raw bytes", lambda: np.zeros(3, dtype="V4"), "not one that workers can exchange"),
    ("field of a record", lambda: np.zeros(3, dtype=[("a", "f8"), ("b", "i4")])["a"], "no multiples of its 8 B"),
    ("list", lambda: [1.0, 2.0], "is a list, not a torch tensor or numpy array"),
    ("numpy number", lambda: np.float32(1), "is a numpy.float32, not a torch tensor"),
    ("nothing", lambda: None, "is a NoneType"),
]


@pytest.mark.filterwarnings("ignore")  # torch announces the end of quantized, nested and sparse tensors
@pytest.mark.parametrize(("kind", "make", "words"), REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_what_cannot_be_registered_is_named_with_a_remedy(kind: str, make: Callable[[], object], words: str) -> None:
    good = torch.arange(4.0)
    with pytest.raises(UsageError, match=words) as caught:
        register({"good": good, f"model.{kind}": make(), "never looked at": object()})  # type: ignore[dict-item]
    assert f"tensor 'model.{kind}'" in str(caught.value)
    assert "nothing was registered" in str(caught.value)
    assert caught.value.hint
    assert good.tolist() == [0, 1, 2, 3]


def test_a_tensor_inside_a_function_transform_is_refused() -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UsageError, match="'w' has no memory of its own"):
            register({"w": row})
        return row

    torch.vmap(inside)(torch.zeros(2, 3))


def test_bad_mappings_and_names() -> None:
    for tensors, words in [
        ({}, "the mapping is empty"),
        ([("w", torch.ones(1))], "not a list"),
        ({1: torch.ones(1)}, "names are strings, but 1 is a int"),
        ({"\ud800": torch.ones(1)}, "unprintable"),
        ({"w\x1b[2J": torch.ones(1)}, "unprintable"),
        ({"w" * 5_000: torch.ones(1)}, "more than 4000"),
    ]:
        with pytest.raises(UsageError, match=words):
            register(tensors)  # type: ignore[arg-type]


def test_thousands_of_tensors_of_one_storage_are_one_piece_and_few_views() -> None:
    fused = torch.zeros(2_000, 16)
    together = register({f"t{i}": fused[i] for i in range(2_000)})
    apart = register({f"t{i}": torch.zeros(16) for i in range(2_000)})
    assert together.layout.digest() == apart.layout.digest()
    assert len(together.pieces) == 1
    assert isinstance(together.stream, HostStream)
    assert isinstance(apart.stream, HostStream)
    assert len(together.stream.views(0, together.size_bytes)) == 1
    assert len(apart.stream.views(1000, 5000)) == 5000 // 64 - 1000 // 64 + 1
    assert len(apart.pieces) == 2_000
    assert len(repr(apart)) < 200


def test_torch_is_not_imported_for_numpy_arrays() -> None:
    program = """
import sys
from tensorhub.protocol.errors import UsageError
import tensorhub.memory.digests, tensorhub.memory.fill, tensorhub.memory.streams
import tensorhub.memory.registration as registration, tensorhub.memory.streams
assert "numpy" not in sys.modules
import numpy
mine = registration.register({"w": numpy.arange(1000)})
assert len(tensorhub.memory.digests.build_manifest(mine, 100).digests) == 80 * 16
assert mine.moved() == []
try:
    registration.register({"w": object()})
except UsageError:
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def objects(cls: type, function: object, types: object, args: object = (), named: object = None) -> None:
    raise AssertionError(f"{cls.__name__} was asked to do {function}")


def test_a_module_is_asked_for_nothing_that_it_may_have_overridden() -> None:
    class Old(torch.nn.Linear):
        """As modules of before `remove_duplicate`."""

        def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
            return super().named_parameters(prefix, recurse)

        def named_buffers(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
            return super().named_buffers(prefix, recurse)

    class Objecting(torch.nn.Parameter):
        __torch_function__ = classmethod(objects)  # type: ignore[assignment]

    module = torch.nn.Sequential(Old(2, 2), torch.nn.BatchNorm1d(2), Old(2, 2, bias=False))
    names = list(module.state_dict())
    module[0].weight.__class__ = Objecting
    registration = register(module)
    assert [tensor.name for tensor in registration.layout.tensors] == names
    assert registration.replaced() == []
    tensor = torch.ones(3)
    tensor.__class__ = Objecting
    assert register({"w": tensor}).replaced() == []


# --- For any tensors at all: the stream is their memory, each byte once, and nothing else makes the layout.


fast = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def build(sizes: list[int], views: Views) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    storages = [np.random.default_rng(index).integers(0, 1 << 32, size, np.uint32) for index, size in enumerate(sizes)]
    tensors = {}
    for index, (storage, start, stop, is_transposed) in enumerate(views):
        view = storages[storage][start:stop]
        if is_transposed and view.size % 2 == 0:
            view = view.reshape(2, -1).T
        tensors[f"t{index}"] = view
    return storages, tensors


@fast
@given(views_of_storages())
def test_a_stream_s_image_written_elsewhere_gives_equal_tensors(made: tuple[list[int], Views]) -> None:
    storages, tensors = build(*made)
    others, copies = build(*made)
    for other in others:
        other[:] = 0
    source, target = register(tensors), register(copies)
    assert source.layout == target.layout
    covered = {(storage, at) for storage, start, stop, _ in made[1] for at in range(start, stop)}
    assert source.size_bytes == 4 * len(covered), "each byte once"
    data = image_of(source)
    third = len(data) // 3
    for start, stop in [(third, 2 * third), (2 * third, len(data)), (0, third)]:
        put_into(target.stream, start, data[start:stop])
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, copies[name])
    for index, (storage, other) in enumerate(zip(storages, others, strict=True)):
        for at in range(storage.size):
            assert other[at] == (storage[at] if (index, at) in covered else 0), (
                "a byte that is not registered was written"
            )
