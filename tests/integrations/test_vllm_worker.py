"""Our half in vLLM's ranks, driven as vLLM drives it, with as little of vLLM as it asks for."""

from unittest import mock

import pytest

import tensorhub

torch = pytest.importorskip("torch")

from tensorhub.integrations import vllm  # noqa: E402

from .vllm_pretended import pretended  # noqa: E402


@pytest.fixture
def make():
    with pretended() as made:
        yield made


@pytest.fixture
def publish(server):
    """`publish(version, at=server, **tensors)`: by a trainer of its own, which ends with the test."""
    opened = []

    def one(version, at=server, **tensors):
        weights = tensorhub.open("policy", replica=f"trainer-{len(opened)}", server=at, call_timeout=20)
        opened.append(weights)
        weights.register(tensors, boxes={})
        weights.publish(version)
        return weights

    yield one
    for weights in opened:
        weights.close(timeout=3)


def attach(llm, server, **options):
    return vllm.attach(llm, "policy", replica="rollout-0", server=server, timeout=10, **options)


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
            assert [each.name for each in tensorhub.connect(other.address).replicas("policy")].count("rollout-0") == 1


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
    monkeypatch.setattr("tensorhub.integrations.vllm_engines.Offline.resume", lambda engine: resumed.append(engine))
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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"w": torch.ones(4, 4)}, "parameter 'v' cannot be .*: 0 of its 2 elements come from what is published"),
        ({**ONES, "w": torch.ones(8, 4)}, r"cannot be followed at 'w' of shape \[8, 4\]"),
        ({**ONES, "x": torch.ones(3)}, r"'x' of shape \[3\] is published, and the engine takes nothing of it.*ignore="),
        ({**ONES, "w": torch.ones(4, 4, dtype=torch.int64)}, "'w' is published as int64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_it_is_loaded(server, publish, make, in_place, tensors, said):
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


@pytest.mark.parametrize("in_place", [False, True])
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


def test_an_error_says_why_a_load_has_failed(server, publish, make):
    publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    with attach(llm, server) as updater:
        publish(2, w=torch.full((4, 4), 2.0))
        load = llm.model.load_weights
        llm.model.load_weights = mock.Mock(side_effect=ValueError("it is too hot"))
        with pytest.raises(tensorhub.VersionUnavailable, match=r"was loaded in part, .*: .*ValueError: it is too hot"):
            updater.update(timeout=10)
        llm.model.load_weights = load
        assert updater.update(timeout=10) == 2
        assert (llm.model.w == 2).all()


def test_a_rank_in_place_keeps_no_copies(server, publish, make):
    trainer = publish(1, w=torch.ones(4, 4))
    llm = make(w=(4, 4))
    with attach(llm, server, in_place=True, prefetch="seed"):
        with trainer.mutating(version=2):
            pass
        assert llm.rank._way.weights.statistics()["host_bytes_limit"] == 0
