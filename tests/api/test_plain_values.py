"""Numbers and names come from numpy, enums and classes of one's own: what is one counts as one, and ends no worker."""

import enum

import numpy as np
import pytest

import tensorhub
from tensorhub import Box


class Number(int):
    """An int by another name."""


class Word(str):
    """A text by another name."""

    __slots__ = ()


class Step(enum.IntEnum):
    NINE = 9


class Name(str, enum.Enum):  # noqa: UP042 - of a StrEnum str() is the text itself
    MODEL = "m"
    LATEST = "latest"


@pytest.mark.parametrize("version", [Number(9), Step.NINE, np.int64(9), np.uint8(9)])
def test_a_version_by_any_name(join, server, version):
    weights, array = join("t", 1.0)
    assert weights.publish(version) == 9
    reader, _ = join("r")
    assert reader.replicate(version) == 9
    reader.pin(version)
    reader.unpin(version)
    assert reader.wait_for(version) == 9
    assert weights.wait_held(version) == ("r",)
    with weights.mutating(version=version + 1):
        array += 1
    assert reader.update(version + 1) == 10
    assert tensorhub.connect(server.address).layout("m", version + 1).size_bytes == array.nbytes


@pytest.mark.parametrize("latest", [Word("latest"), np.str_("latest"), Name.LATEST])
def test_latest_by_any_name(join, latest):
    join("t", 1.0)[0].publish(1)
    reader, array = join("r")
    reader.prefetch(latest)
    assert reader.replicate(latest) == 1
    assert reader.update(latest) == 1
    assert reader.wait_for(latest) == 1
    reader.check()
    assert (array == 1).all()


def test_a_set_takes_them_too(join, server):
    for model in ("m", "m2"):
        join("t", 1.0, model=model)[0].publish(9)
    with tensorhub.open_set([Word("m"), np.str_("m2")], replica=Word("r"), server=server.address) as reader:
        reader.register({"m": {"w": np.zeros(50_000, np.float32)}, "m2": {"w": np.zeros(50_000, np.float32)}})
        assert reader.replicate(np.int64(9)) == 9
        assert reader.update(np.str_("latest")) == 9


@pytest.mark.parametrize("model", [Word("m"), np.str_("m"), Name.MODEL])
def test_names_and_places_by_any_name(server, model):
    with tensorhub.open(
        model,
        replica=Word("t"),
        shard=np.int64(0),
        shards=Number(1),
        site=np.str_("here"),
        prefetch=np.str_("never"),
        token=Word(""),
        server=server.address,
    ) as weights:
        weights.register(
            {np.str_("w"): np.ones((4, 4), np.float32)}, boxes={Word("w"): [Box(Word("g"), (4, 4), (0, 0), (4, 4))]}
        )
        assert weights.publish(1) == 1
        with tensorhub.open_group(model, replica="g", shards=np.int64(1), server=server.address) as group:
            group.register([{"w": np.zeros((4, 4), np.float32)}], boxes=[{"w": [Box("g", (4, 4), (0, 0), (4, 4))]}])
            assert group.replicate("latest") == 1


@pytest.mark.parametrize("partial", ["yes", 1, 0, None, np.True_])
def test_partial_is_yes_or_no(join, partial):
    weights, array = join("t", 1.0)
    with pytest.raises(tensorhub.UsageError, match="is neither True nor False"):
        weights.register({"w": array}, boxes={}, partial=partial)
    assert weights.publish(1) == 1


@pytest.mark.parametrize("tensors", [None, 3, {"w": np.ones(1)}, [], iter([])])
def test_a_group_wants_one_mapping_for_each_shard(server, tensors):
    with tensorhub.open_group("m", replica="g", shards=1, server=server.address) as group:
        with pytest.raises(tensorhub.UsageError, match="are for 1 shards, in order"):
            group.register(tensors)
        with pytest.raises(tensorhub.UsageError, match=r"boxes of .* are for 1 shards, in order"):
            group.register([{"w": np.ones(1)}], boxes=3)
        group.register(each for each in [{"w": np.ones(1)}])
        assert group.publish(1) == 1


def test_numbers_that_python_itself_refuses(server):
    with pytest.raises(tensorhub.UsageError, match="names no version"):
        tensorhub.load("m@" + "1" * 5000, server=server.address)
    with pytest.raises(tensorhub.UsageError, match="is not a number of seconds"):
        tensorhub.open("m", replica="t", server=server.address, timeout=10**400)
