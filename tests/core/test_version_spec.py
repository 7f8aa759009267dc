"""How callers name versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.messages import HIGHEST_VERSION, parse_spec, steps_back


@given(st.integers(0, HIGHEST_VERSION))
def test_an_integer_is_that_version(version: int) -> None:
    assert parse_spec(version) == version


@pytest.mark.parametrize("spec", ["latest", "latest-0", "latest-1", "latest-999999999"])
def test_latest_names_none_outright(spec: str) -> None:
    assert parse_spec(spec) is None


def test_prefetched_is_for_updates_alone() -> None:
    assert parse_spec("prefetched", "update") is None
    for verb in ("", "replicate", "publish"):
        with pytest.raises(UsageError, match="update"):
            parse_spec("prefetched", verb)


def test_steps_back() -> None:
    assert [steps_back(spec) for spec in ("latest", "latest-0", "latest-12")] == [0, 0, 12]


WRONG = [-1, HIGHEST_VERSION + 1, True, "", "7", "Latest", "latest-", "latest--1", "latest-1 ", "latest\n", "newest"]


@pytest.mark.parametrize("spec", [*WRONG, "latest-1234567890", None, 1.0])
def test_anything_else_is_the_callers_mistake(spec: object) -> None:
    with pytest.raises(UsageError):
        parse_spec(spec)  # type: ignore[arg-type]


@given(st.text())
def test_text_is_understood_or_refused(text: str) -> None:
    try:
        assert parse_spec(text) is None
        assert steps_back(text) >= 0
    except UsageError as error:
        assert repr(text) in str(error)  # noqa: PT017
