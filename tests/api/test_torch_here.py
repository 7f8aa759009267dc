"""A torch that cannot be loaded is done without, and a mode or transform of the caller changes nothing."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tensorhub

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np, tensorhub

def said(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "|", error, "|", error.hint)

with tensorhub.serve() as server, tensorhub.open("m", replica="t", server=server.address) as weights:
    array = tensorhub.empty((3, 4), "float32")
    array[:] = 1
    weights.register({"w": array, "b": np.ones(2, np.float16)})
    weights.publish(1)
    found = tensorhub.load("m@1", server=server.address)
    print([type(found[name]).__name__ for name in found], float(found["w"].sum()))
    print(type(tensorhub.empty(3, np.float64)).__name__, type(tensorhub.empty_like(array)).__name__)
    weights.unpublish()
    weights.register({"w": array}, dtype="float16")
    print(weights.publish(2))
    weights.unpublish()
    said(lambda: tensorhub.empty(3, "bfloat16"))
    said(lambda: weights.register({"w": array}, dtype="bfloat16"))
"""

BROKEN = {
    "OSError": "raise OSError('libcudart.so.12: cannot open shared object file')",
    "has no tensors": "",
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", BROKEN)
def test_numpy_does_where_torch_cannot_be_loaded(kind: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN[kind])
    path = [str(tmp_path), str(Path(tensorhub.__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    arrays, empties, published, *errors = done.stdout.splitlines()
    assert (arrays, empties, published) == ("['ndarray', 'ndarray'] 12.0", "ndarray ndarray", "2")
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("UsageError | ")
        assert "torch is installed here and cannot be loaded" in error
        assert kind in error
    assert done.stderr.count("torch is installed and cannot be loaded: numpy does without it") == 1


class Raising(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise RuntimeError("no torch function here")


class RaisingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise RuntimeError("no dispatch here")


def in_transform(call: Callable[[], None]) -> None:
    torch.func.vmap(lambda _: (call(), torch.zeros(()))[1])(torch.zeros(2))


def in_gradient(call: Callable[[], None]) -> None:
    torch.func.grad(lambda x: (call(), x.sum())[1])(torch.zeros(2))


def inside(mode: Callable[[], AbstractContextManager[object]]) -> Callable[[Callable[[], None]], None]:
    def run(call: Callable[[], None]) -> None:
        with mode():
            call()

    return run


CALLERS = {
    "fake": inside(FakeTensorMode),
    "function mode": inside(Raising),
    "dispatch mode": inside(RaisingDispatch),
    "meta device": inside(lambda: torch.device("meta")),
    "inference": inside(torch.inference_mode),
    "vmap": in_transform,
    "grad": in_gradient,
}


@pytest.mark.parametrize(
    ("kind", "how"), [("module", "fake"), ("module", "vmap"), *(("masters", how) for how in CALLERS)]
)
def test_a_mode_of_the_caller_changes_nothing(how: str, kind: str) -> None:
    """Nor does it change what is allocated, published, checked, loaded or updated within it."""
    module, other = torch.nn.Linear(3, 2).bfloat16().float(), torch.nn.Linear(3, 2)
    given = module
    wanted = [parameter.detach().clone() for parameter in module.parameters()]
    found: list[object] = []
    with (
        tensorhub.serve() as server,
        tensorhub.open("m", replica="t", server=server.address) as trainer,
        tensorhub.open("m", replica="r", server=server.address) as reader,
    ):

        def call() -> None:
            if found:
                return
            dtype = "bfloat16" if kind == "masters" else None
            trainer.register(given, dtype=dtype)
            trainer.publish(1)
            trainer.check()
            reader.register(other, dtype=dtype)
            reader.replicate(1)
            found.extend([tensorhub.load("m@1", server=server.address), tensorhub.empty(3, "bfloat16")])
            found.append(tensorhub.empty_like(wanted[0]))

        CALLERS[how](call)
    loaded, *made = found
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.parameters(), wanted, strict=True))
    assert isinstance(loaded, dict)
    assert all(torch.equal(mine.float(), right) for mine, right in zip(loaded.values(), wanted, strict=True))
    for tensor in made:
        assert type(tensor) is torch.Tensor
        assert tensor.device.type == "cpu"
        assert tensor.data_ptr()


@pytest.mark.parametrize("how", ["fake", "meta device"])
def test_tensors_without_memory_are_refused_by_name(how: str) -> None:
    def call() -> None:
        module = torch.nn.Linear(3, 2)
        for given in (module, dict(module.named_parameters()), {"weight": torch.zeros(3)}):
            with pytest.raises(tensorhub.UsageError, match=r"tensor 'weight' is .* it has no memory") as caught:
                weights.register(given)
            assert caught.value.hint
        weights.register({"w": np.ones(3)})

    with tensorhub.serve() as server, tensorhub.open("m", replica="t", server=server.address) as weights:
        CALLERS[how](call)
