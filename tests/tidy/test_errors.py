"""The tree drawn in `protocol/errors.py` is the tree that is there, and every error says all that it must."""

import inspect

import pytest

from tensorhub.protocol import errors

from .error_tree import drawn_tree

CLASSES = [
    found
    for found in vars(errors).values()
    if inspect.isclass(found) and issubclass(found, BaseException) and found.__module__ == errors.__name__
]


def test_the_drawing_is_the_tree() -> None:
    assert drawn_tree(errors.__doc__ or "") == {found.__name__: found.__bases__[0].__name__ for found in CLASSES}
    assert list(drawn_tree(errors.__doc__ or "")) == [found.__name__ for found in CLASSES], "the order differs"


@pytest.mark.parametrize("error", [e for e in CLASSES if issubclass(e, errors.TensorHubError)])
def test_each_error_has_its_own_code(error: type[errors.TensorHubError]) -> None:
    assert "code" in vars(error), "it would travel as its base"
    assert errors.BY_CODE[error.code] is error
    assert type(errors.error_from_code(error.code, "what", hint="do this")) is error


def test_an_unknown_code_is_the_root() -> None:
    assert type(errors.error_from_code("from-the-future", "what")) is errors.TensorHubError
