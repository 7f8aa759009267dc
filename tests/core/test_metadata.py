"""What a publisher says of a version beside its tensors: JSON as it was said, bounded, and under the root."""

import json
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.manifest import (
    MAX_METADATA_BYTES,
    Manifest,
    decode_manifest,
    decode_metadata,
    digest_of_metadata,
    encode_metadata,
)
from tensorhub.protocol.messages import CallReport
from tensorhub.protocol.names import Digest, ReplicaName, Shard
from tensorhub.server.groups import Replica

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


@given(st.dictionaries(st.text(), VALUES, max_size=4).filter(is_text))
def test_it_comes_out_as_it_went_in(metadata: dict[str, object]) -> None:
    encoded = encode_metadata(metadata)
    assert decode_metadata(encoded) == metadata
    assert decode_manifest(replace(MANIFEST, metadata=encoded).encode()).metadata == encoded


def test_equal_objects_are_equal_bytes_whatever_their_order() -> None:
    one, other = {"a": 1, "b": [1, 2]}, OrderedDict(b=(1, 2), a=1)
    assert encode_metadata(one) == encode_metadata(other) == b'{"a":1,"b":[1,2]}'


def test_nothing_takes_nothing() -> None:
    assert encode_metadata({}) == b""
    assert decode_metadata(b"") == {}
    assert digest_of_metadata(b"") == ""
    assert MANIFEST.root() == replace(MANIFEST, metadata=encode_metadata({})).root()


def test_it_is_part_of_what_a_version_is() -> None:
    assert MANIFEST.root() != replace(MANIFEST, metadata=encode_metadata({"a": 1})).root()


class Scalar(float):
    """As numpy has them."""


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (None, "of type NoneType"),
        ([1], "of type list"),
        ("{}", "of type str"),
        ({1: 2}, "metadata has the key 1"),
        ({"a": {"b": {None: 1}}}, r"metadata\['a'\]\['b'\] has the key None"),
        ({"a": [0, object()]}, r"metadata\['a'\]\[1\] is of type object"),
        ({"a": b"x"}, "is of type bytes"),
        ({"a": {1}}, "is of type set"),
        ({"loss": float("nan")}, r"metadata\['loss'\] is nan"),
        ({"loss": -float("inf")}, "is -inf"),
        ({"loss": Scalar(1.0)}, "is of type Scalar"),
        ({"a": "\ud800"}, "cannot be written as JSON"),
        ({"\ud800": 1}, "cannot be written as JSON"),
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


def test_the_most_that_fits() -> None:
    most = {"a": "x" * (MAX_METADATA_BYTES - len('{"a":""}'))}
    assert len(encode_metadata(most)) == MAX_METADATA_BYTES
    assert decode_metadata(encode_metadata(most)) == most


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
