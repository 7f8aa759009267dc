"""Version specs, metadata, error codes and settings."""

import json
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub.protocol import errors
from tensorhub.protocol.errors import BY_CODE, TensorHubError, UsageError, error_from_code
from tensorhub.protocol.manifest import (
    MAX_METADATA_BYTES,
    Manifest,
    decode_manifest,
    decode_metadata,
    digest_of_metadata,
    encode_metadata,
)
from tensorhub.protocol.messages import HIGHEST_VERSION, CallReport, parse_spec, steps_back
from tensorhub.protocol.names import Digest, ReplicaName, Shard
from tensorhub.protocol.settings import Settings
from tensorhub.server.groups import Replica

# --- how callers name versions ---


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


# --- what a publisher says of a version beside its tensors: JSON as it was said, bounded, and under the root ---

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aé\n😀")
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
MANIFEST = Manifest(Digest("l"), 0, 4, "xxh3-128", b"")


def is_text(value: object) -> bool:
    """No half of a surrogate pair, which is no Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


@settings(max_examples=30)
@given(st.dictionaries(st.text(), VALUES, max_size=4).filter(is_text))
def test_it_comes_out_as_it_went_in(metadata: dict[str, object]) -> None:
    encoded = encode_metadata(metadata)
    assert decode_metadata(encoded) == metadata
    assert decode_manifest(replace(MANIFEST, metadata=encoded).encode()).metadata == encoded


def test_equal_objects_are_equal_bytes_whatever_their_order() -> None:
    one, other = {"a": 1, "b": [1, 2]}, OrderedDict(b=(1, 2), a=1)
    assert encode_metadata(one) == encode_metadata(other) == b'{"a":1,"b":[1,2]}'


class Scalar(float):
    """As numpy has them."""


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (None, "of type NoneType"),
        ([1], "of type list"),
        ({1: 2}, "metadata has the key 1"),
        ({"a": {"b": {None: 1}}}, r"metadata\['a'\]\['b'\] has the key None"),
        ({"a": [0, object()]}, r"metadata\['a'\]\[1\] is of type object"),
        ({"a": b"x"}, "is of type bytes"),
        ({"loss": float("nan")}, r"metadata\['loss'\] is nan"),
        ({"loss": Scalar(1.0)}, "is of type Scalar"),
        ({"a": "\ud800"}, "cannot be written as JSON"),
        ({"a": 10**5000}, "cannot be written as JSON"),
        ({"short": 1, "long": "x" * MAX_METADATA_BYTES}, "over 16384 B; its largest value is 'long'"),
    ],
)
def test_what_is_no_json_is_named(metadata: object, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        encode_metadata(metadata)


def test_a_ring_and_a_tower() -> None:
    ring: dict[str, object] = {}
    ring["again"] = ring
    with pytest.raises(UsageError, match="more than 32 levels deep"):
        encode_metadata(ring)


@pytest.mark.parametrize(
    "encoded",
    [b"{", b"[1]", b"7", b"null", b"\xff", b'{"a":NaN}', b"[" * 9000, b'{"a":"' + b"x" * 20_000 + b'"}'],
)
def test_a_manifest_with_other_things_is_malformed(encoded: bytes) -> None:
    with pytest.raises(UsageError, match="metadata"):
        decode_manifest(replace(MANIFEST, metadata=encoded).encode())


def test_shards_that_say_different_things_make_different_calls() -> None:
    replica = Replica(ReplicaName("trainer"), 2)
    mine, other = (digest_of_metadata(encode_metadata({"loss": loss})) for loss in (1, 2))
    replica.arrive(Shard(0), CallReport(1, "publish", 7, Digest("r"), metadata=mine), now=0.0)
    replica.arrive(Shard(1), CallReport(1, "publish", 7, Digest("s"), metadata=other), now=0.0)
    assert replica.call is not None
    assert replica.missing() == [1]
    assert (
        replica.call.difference(replica.name) == "shard 1 of trainer called publish(7) with other metadata than shard 0"
    )


# --- the error tree: whose fault, retry or not, and the code that travels ---


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


# --- the numbers that decide how patient everybody is fit together ---


def test_a_worker_stops_trusting_before_the_server_stops_believing() -> None:
    settings = Settings()
    fastest, slowest = 1 + settings.drift / 2, 1 - settings.drift / 2  # of two clocks, 10 % apart
    assert settings.trust_s / slowest < settings.lease_s / fastest


def test_other_numbers_scale() -> None:
    assert Settings(lease_s=4.0, drift=0.25).trust_s == 3.0
