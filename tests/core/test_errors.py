"""The error tree: whose fault, retry or not, and the code that travels."""

import pytest

from tensorhub.protocol import errors
from tensorhub.protocol.errors import BY_CODE, TensorHubError, error_from_code


@pytest.mark.parametrize("code", BY_CODE)
def test_an_error_travels_as_its_code(code: str) -> None:
    error = error_from_code(code, "what happened", hint="what to do")
    assert type(error) is BY_CODE[code]
    assert (error.code, str(error), error.hint) == (code, "what happened", "what to do")
    assert error.__notes__ == ["hint: what to do"]


def test_a_code_of_a_newer_peer_is_still_an_error() -> None:
    assert type(error_from_code("from-the-future", "?")) is TensorHubError


def test_codes_are_different_and_every_class_has_its_own() -> None:
    classes = [found for found in vars(errors).values() if isinstance(found, type)]
    named = [found for found in classes if issubclass(found, TensorHubError)]
    assert sorted(found.__name__ for found in named) == sorted(found.__name__ for found in BY_CODE.values())


def test_the_callers_mistakes_are_not_to_be_retried() -> None:
    for found in BY_CODE.values():
        assert not (issubclass(found, errors.UsageError) and found.retryable), found
        assert not issubclass(found, errors.Unavailable) or found.retryable, found


def test_our_own_bugs_are_not_caught_with_the_rest() -> None:
    assert not issubclass(errors.InvariantViolation, TensorHubError)
    assert not hasattr(TensorHubError("plain"), "__notes__")
