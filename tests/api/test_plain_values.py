"""Numbers and names come from numpy, enums and classes of one's own: what is one counts as one, and ends no worker."""

import enum
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub import Box
from tensorhub.memory.registration import register
from tensorhub.runtime.config import check_place, parse_fraction, server_settings, worker_options
from tensorhub.runtime.questions import plain_spec


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


SECONDS = [
    np.float32(5.5),
    np.float16(5.5),
    np.int64(5),
    np.array(5.5),
    torch.tensor(5.5),
    Fraction(11, 2),
    Decimal("5.5"),
]
NO_SECONDS = [np.float32("nan"), np.float64("inf"), Decimal("NaN"), Decimal("sNaN"), Fraction(10**400), np.bool_(True)]
NO_SECONDS += [np.array([5.5]), torch.tensor(True), 5j, np.complex64(5), np.int64(0), -np.float32(1), b"5", [5]]


@pytest.mark.parametrize("seconds", SECONDS, ids=repr)
def test_seconds_by_any_number(server, seconds):
    with tensorhub.open("m", replica="t", server=server.address, timeout=seconds, call_timeout=seconds) as weights:
        weights.register({"w": np.ones(4)})
        assert weights.publish(1, timeout=seconds) == 1
        assert weights.wait_for(1, timeout=seconds) == 1
    assert tensorhub.connect(server.address, timeout=seconds).models() == ["m"]
    assert server_settings({}, lease_s=seconds).lease_s == float(seconds)


@pytest.mark.parametrize("seconds", NO_SECONDS, ids=repr)
def test_what_is_no_number_of_seconds_is_refused_by_name(server, seconds):
    with pytest.raises(tensorhub.UsageError, match=r"^timeout="):
        tensorhub.connect(server.address, timeout=seconds)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)], ids=repr)
def test_counts_by_any_integer(server, number):
    options = worker_options({}, retain=number, chunk_bytes=number, host_bytes=number)
    assert (options.retain, options.chunk_bytes, options.host_bytes) == (2, 2, 2)
    assert server_settings({}, most_models=number).most_models == 2
    assert check_place("m", "r", number - 1, number) == ("m", "r", 1, 2)
    assert plain_spec(number) == 2
    assert parse_fraction(number / 4, "fraction") == 0.5


def test_shapes_and_boxes_of_numpys_integers():
    two = np.int64(2)
    assert tuple(tensorhub.empty((two, 3)).shape) == (2, 3)
    assert tuple(tensorhub.empty(two).shape) == (2,)
    box = Box("g", (two, two), (np.int64(0), 0), (two, two), np.int64(0), (two, np.int64(1)))
    plain = Box("g", (2, 2), (0, 0), (2, 2), 0, (2, 1))
    made = [register({"w": np.ones((2, 2), np.float32)}, boxes={"w": [each]}) for each in (box, plain)]
    assert made[0].layout_digest == made[1].layout_digest


@pytest.mark.parametrize(
    ("module", "question", "patched", "says"),
    [
        ("gevent.monkey", "is_module_patched", ("threading", "socket", "select", "os"), "threading, socket, select"),
        ("gevent.monkey", "is_module_patched", ("socket",), "socket"),
        ("eventlet.patcher", "is_monkey_patched", ("thread",), "thread"),
    ],
)
def test_threads_that_are_none_are_blamed_by_name(server, monkeypatch, module, question, patched, says):
    weights = tensorhub.open("m", replica="t", server=server.address)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{question: lambda name: name in patched}))
    for ask in (
        lambda: tensorhub.open("m", replica="r", server=server.address),
        lambda: tensorhub.load("m@1", server=server.address),
        lambda: tensorhub.connect(server.address),
        tensorhub.serve,
    ):
        with pytest.raises(tensorhub.UsageError, match=f"has patched {says} in this process") as raised:
            ask()
        assert "process of its own" in raised.value.hint
    patched = ("os", "signal", "queue", "subprocess", "time")
    assert tensorhub.connect(server.address).models() == ["m"], "what else is patched does no harm"
    weights.close()
