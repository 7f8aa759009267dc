"""A context manager that raises another error keeps nothing of the first one."""

import weakref
from collections.abc import Iterator

import pytest

from tensorhub.transport.threads import scope


class Other(Exception):
    """What the block's error becomes."""


class Tensor:
    """What frames on the way know."""


@scope
def block(said: list[str], *, takes: type[BaseException] = KeyError) -> Iterator[str]:
    """Says what happens."""
    said.append("in")
    try:
        yield "given"
    except takes:
        said.append("taken")
    except OSError as error:
        raise Other from error
    finally:
        said.append("out")


def test_a_block_that_ends_well() -> None:
    said: list[str] = []
    with block(said) as given:
        said.append(given)
    assert said == ["in", "given", "out"]


def test_what_the_generator_takes_goes_no_further() -> None:
    said: list[str] = []
    with block(said):
        raise KeyError
    assert said == ["in", "taken", "out"]


@pytest.mark.parametrize("error", [ValueError, StopIteration, RuntimeError, KeyboardInterrupt])
def test_other_errors_go_on_as_they_were(error: type[BaseException]) -> None:
    said, raised = list[str](), error("this one")
    with pytest.raises(error) as caught, block(said):
        raise raised
    assert caught.value is raised
    assert [entry.name for entry in caught.traceback] == ["test_other_errors_go_on_as_they_were"]
    assert said == ["in", "out"]


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_of_an_error_that_became_another() -> None:
    """With `contextlib` it would be, from Python 3.12 on."""

    def fails() -> "weakref.ref[Tensor]":
        tensor = Tensor()
        try:
            with block([]):
                raise OSError(tensor)
        except Other:
            return weakref.ref(tensor)

    assert fails()() is None
