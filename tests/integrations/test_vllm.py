"""The driver of vLLM, and our half in its ranks, with as little of vLLM as they ask for: one rank, and no layers."""

import contextlib
from unittest import mock

import pytest
import torch

import tensorhub
from tensorhub.integrations import vllm
from tensorhub.integrations.whole import Whole

from .vllm_pretended import Server, pretended


@pytest.fixture
def make():
    with pretended() as made:
        yield made


@pytest.fixture
def publish(server):
    """`publish(version, at=server, **tensors)`: by a trainer of its own, which ends with the test or the next one."""
    opened = []

    def one(version, at=server, **tensors):
        for former, where in opened:
            if where == at:
                former.close(timeout=3)
        weights = tensorhub.open("policy", replica=f"trainer-{len(opened)}", server=at, call_timeout=20)
        opened.append((weights, at))
        weights.register(tensors, boxes={})
        weights.publish(version)
        return weights

    yield one
    for weights, _ in opened:
        weights.close(timeout=3)


@pytest.fixture
def served(make):
    """A server of vLLM."""
    found = Server(make(w=(64,)))
    yield found
    found.close()


@pytest.fixture
def step(server):
    """`step(7)`: the trainer has written that number over all weights, and published it."""
    with tensorhub.open("policy", replica="trainer", server=server, call_timeout=20, retain=1) as weights:
        tensor = torch.zeros(64)
        weights.register({"w": tensor}, boxes={})

        def made(version):
            with weights.mutating(version=version):
                tensor.fill_(float(version))

        yield made


def attach(engine, server, **options):
    return vllm.attach(engine, "policy", replica="rollout-0", server=server, timeout=10, **options)


def replicas(server):
    return [each.name for each in tensorhub.connect(server).replicas("policy")]


def fails(updater, match=": 500", error=tensorhub.Unavailable):
    """The next update does."""
    with pytest.raises(error, match=match):
        updater.update(timeout=10)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_engine_goes_to_another_server_when_it_has_left_the_first(server, publish, make, in_place):
    with tensorhub.serve(lease_s=2.0, report_s=0.25) as other:
        publish(7, w=torch.full((4, 4), 1.0))
        publish(7, at=other.address, w=torch.full((4, 4), 2.0))
        llm = make(w=(4, 4))
        with attach(llm, server, in_place=in_place):
            assert (llm.model.w == 1).all()
            with pytest.raises(tensorhub.TensorHubError, match="has joined policy with other options"):
                attach(llm, other.address, in_place=in_place)
            assert (llm.model.w == 1).all()
        with attach(llm, other.address, in_place=in_place) as updater:
            assert updater.version == 7
            assert (llm.model.w == 2).all()
            assert replicas(other.address).count("rollout-0") == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_another_job_may_have_other_tensors(server, publish, make, in_place):
    first = publish(1, w=torch.full((4, 4), 1.0))
    llm = make(w=(4, 4))
    updater = attach(llm, server, in_place=in_place, ignore=["value_*"])
    updater.close()
    first.close(timeout=3)
    publish(2, w=torch.full((4, 4), 2.0), value_head=torch.ones(3))  # which the engine leaves out
    assert updater.update(timeout=10) == 2
    assert (llm.model.w == 2).all()
    updater.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_driver_that_finds_an_engine_with_a_version_leaves_it_that(server, publish, make, in_place, monkeypatch):
    """It fails to bring the next one, and does not know of the one before."""
    resumed = []
    monkeypatch.setattr("tensorhub.integrations.vllm.Offline.resume", lambda engine: resumed.append(engine))
    w = torch.full((4, 4), 1.0)
    trainer = publish(1, w=w)
    llm = make(w=(4, 4))
    attach(llm, server, in_place=in_place)  # by a driver that is killed
    with trainer.mutating(version=2):
        pass
    if in_place:  # its source is gone before a byte has come
        lost = mock.Mock(side_effect=tensorhub.SourceLost("it is gone"))
        monkeypatch.setattr("tensorhub.integrations.vllm_worker.InPlace.load", lost)
    else:
        w.fill_(9.0)  # what is published is not what was announced
    with pytest.raises(tensorhub.VersionUnavailable, match="the engine goes on with what it had"):
        attach(llm, server, in_place=in_place)
    assert len(resumed) == 1
    assert (llm.model.w == 1).all()
    assert llm.model.forward() == 1


ONES = {"w": torch.ones(4, 4), "v": torch.ones(2)}


UNFIT = {
    "lacks": ({"w": torch.ones(4, 4)}, "parameter 'v' cannot be .*: 0 of its 2 elements come from what is published"),
    "shape": ({**ONES, "w": torch.ones(8, 4)}, r"cannot be followed at 'w' of shape \[8, 4\]"),
    "more": (
        {**ONES, "x": torch.ones(3)},
        r"'x' of shape \[3\] is published, and the engine takes nothing of it.*ignore=",
    ),
    "dtype": ({**ONES, "w": torch.ones(4, 4, dtype=torch.int64)}, "'w' is published as int64"),
}
OFTEN = (("lacks", True), ("shape", False), ("more", False), ("more", True), ("dtype", False))
SELDOM = (("lacks", False), ("shape", True), ("dtype", True))


@pytest.mark.parametrize(
    ("kind", "in_place"), [*OFTEN, *(pytest.param(*each, marks=pytest.mark.long) for each in SELDOM)]
)
def test_what_does_not_fit_is_refused_by_name_before_it_is_loaded(server, publish, make, kind, in_place):
    tensors, said = UNFIT[kind]
    llm = make(w=(4, 4), v=(2,))
    unfit = publish(1, **tensors)
    with pytest.raises(tensorhub.TensorHubError, match=said):
        attach(llm, server, in_place=in_place)
    assert (llm.model.w == -1).all()
    unfit.close(timeout=3)
    publish(2, **ONES)
    with attach(llm, server, in_place=in_place) as updater:
        assert (llm.model.w == 1).all()
        publish(3, **{name: tensor * 2 for name, tensor in tensors.items()})
        with pytest.raises(tensorhub.VersionUnavailable, match=r"the engine goes on with 2: .*'[vwx]'"):
            updater.update(timeout=10)
        assert (llm.model.w == 1).all()
        assert llm.model.forward() == 1


def test_what_an_engine_ignores_may_come_later(server, publish, make):
    """In place it is no part of the replica: the engine sees it only when it looks at what each version is made of."""
    publish(1, **ONES)
    with attach(make(w=(4, 4), v=(2,)), server, in_place=True, ignore="value_*") as updater:
        publish(2, **ONES, value_head=torch.ones(3))
        assert updater.update(timeout=10) == 2


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_an_earlier_version_has_computed_is_cleared(server, publish, make, in_place):
    """A NaN in vLLM's cache of keys and values would spoil what a good version computes."""
    publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    with attach(llm, server, in_place=in_place) as updater:
        llm.model.kv_cache = [torch.full((2,), torch.nan)]
        publish(2, w=torch.ones(4, 4))
        updater.update(timeout=10)
        assert (llm.model.kv_cache[0] == 0).all()


def test_memory_that_sleeps_is_neither_cleared_nor_loaded(server, publish, make):
    """Weights wake before an update, the cache of keys and values may wake after it."""
    publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    with attach(llm, server) as updater:
        llm.model.kv_cache = [torch.full((2,), torch.nan)]
        asleep = [llm.model.w, llm.model.kv_cache[0]]
        publish(2, w=torch.full((4, 4), 2.0))
        with mock.patch("tensorhub.memory.cuda.is_mapped", lambda tensor: all(tensor is not each for each in asleep)):
            with pytest.raises(tensorhub.TensorHubError, match="no memory is behind 1 parameters, 'w' for one"):
                updater.update(timeout=10)
            del asleep[0]
            assert updater.update(timeout=10) == 2
        assert (llm.model.w == 2).all()
        assert llm.model.kv_cache[0].isnan().all()


def test_a_load_that_fails_half_way_is_said_refused_and_mended(server, publish, make):
    publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    with attach(llm, server) as updater:
        publish(2, w=torch.full((4, 4), 2.0))
        with mock.patch.object(llm.model, "load_weights", side_effect=ValueError("it is too hot")):
            fails(updater, r"was loaded in part, .*: .*ValueError: it is too hot", tensorhub.VersionUnavailable)
        assert updater.version is None
        with pytest.raises(tensorhub.VersionUnavailable, match="the weights are no version"):
            llm.model.forward()
        assert updater.update(timeout=10) == 2
        assert llm.model.forward() == 1
        assert (llm.model.w == 2).all()


def test_a_loader_that_changes_what_it_is_given_changes_nothing_that_others_read(server, publish, make):
    publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    load = llm.model.load_weights

    def careless(weights):
        for name, tensor in weights:
            load([(name, tensor)])
            tensor.zero_()

    llm.model.load_weights = careless
    with attach(llm, server):
        llm.rank._way.weights.check()
        assert (llm.model.w == 1).all()


def test_a_rank_in_place_keeps_no_copies(server, publish, make):
    trainer = publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    with attach(llm, server, in_place=True, prefetch="seed"):
        with trainer.mutating(version=2):
            pass
        assert llm.rank._way.weights.statistics()["host_bytes_limit"] == 0


def test_an_engine_that_joins_beside_a_trainer_in_haste_gets_what_is_newest_then(server, step, served):
    """What was the newest when it asked is gone when it reads: it asks again."""
    step(1)
    steps, update = iter((2, 3)), served.llm.update_weights

    def goes_on(request):
        for version in steps:
            step(version)
        update(request)

    served.llm.update_weights = goes_on
    updater = attach(served.url, server)
    assert updater.version == 3
    assert served.llm.model.w.eq(3.0).all()
    assert ("/resume", {}) in served.calls


def test_an_engine_that_leaves_frees_its_place_at_once_and_may_come_back(server, step, served):
    step(1)
    with attach(served.url, server) as updater:
        assert "rollout-0" in replicas(server)
    assert "rollout-0" not in replicas(server)
    assert updater.version == 1, "it computes with that"
    step(2)
    with Whole("policy", replica="rollout-0", server=server) as other:  # which holds what the engine is told to load
        assert other.update() == 2
        fails(updater, "could not join", tensorhub.TensorHubError)
        assert updater.version == 1
        assert served.llm.model.w.eq(1.0).all()
    assert updater.update(timeout=30) == 2
    assert served.llm.model.w.eq(2.0).all()


def test_an_engine_that_has_left_loads_the_number_that_it_has_again(served):
    """Another job has begun anew, with another server at that address and other weights under that number."""

    @contextlib.contextmanager
    def job(number, port=0):
        with (
            tensorhub.serve(port=port, lease_s=2.0, report_s=0.25) as hub,
            tensorhub.open("policy", replica="trainer", server=hub.address) as weights,
        ):
            weights.register({"w": torch.full((64,), number)}, boxes={})
            weights.publish(0)
            yield hub.address

    with job(1.0) as address:
        updater = attach(served.url, address)
        assert updater.version == 0
        updater.close()
    with job(5.0, int(address.rpartition(":")[2])):
        assert updater.update(timeout=30) == 0
        assert served.llm.model.w.eq(5.0).all()
        updater.close()


def test_an_engine_that_could_not_be_told_to_go_on_is_told_again(server, step, served):
    step(1)
    updater = attach(served.url, server)
    for version in (2, 3):
        step(version)
        served.fails = {"/resume"}
        fails(updater)
        assert served.is_paused
        assert updater.version is None, "it does not compute"
        if version == 2:
            assert updater.update(timeout=30) == updater.version == 2
            assert not served.is_paused
    step(4)
    with mock.patch.object(served.llm.rank._way, "fetch", side_effect=ValueError("it is too hot")):
        fails(updater, "could not fetch policy@4, and the engine goes on with 3: .*", tensorhub.VersionUnavailable)
    assert updater.version == 3
    assert not served.is_paused
    assert served.llm.said == "3"


def test_an_update_that_came_to_nothing_is_ended_by_the_next_or_by_leaving(server, step, served):
    step(1)
    updater = attach(served.url, server)
    for version, path in ((2, "/finish_weight_update"), (3, "/finish_weight_update"), (4, "/update_weights")):
        step(version)
        served.fails = {path}
        fails(updater)
        assert updater.update(timeout=30) == updater.version == version
        assert served.llm.model.w.eq(float(version)).all()
    step(5)
    served.fails = {"/finish_weight_update"}
    fails(updater)
    updater.close()
    assert served.calls[-1][0] == "/shutdown_weight_transfer_engine"
    assert served.llm.model.w.eq(4.0).all(), "what was fetched is discarded"
    assert updater.update(timeout=30) == updater.version == 5


def test_what_was_computed_with_old_weights_is_forgotten_by_the_next_update(server, step, make):
    step(1)
    llm, once = make(w=(64,)), RuntimeError("once")
    llm.reset_prefix_cache = mock.Mock(side_effect=[once, None, once, None])
    with pytest.raises(RuntimeError, match="once"):
        attach(llm, server)
    with attach(llm, server) as updater:
        step(2)
        fails(updater, "once", RuntimeError)
        assert updater.update(timeout=30) == 2
        assert llm.reset_prefix_cache.call_count == 4
        assert llm.said == "2"
