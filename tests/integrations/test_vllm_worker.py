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
    updater = attach(llm, server, in_place=in_place)
    updater.close()
    first.close(timeout=3)
    publish(2, w=torch.full((4, 4), 2.0), value_head=torch.ones(3))  # which the model's loader leaves out
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
        monkeypatch.setattr("tensorhub.integrations.vllm_in_place.InPlace.load", lost)
    else:
        w.fill_(9.0)  # what is published is not what was announced
    with pytest.raises(tensorhub.VersionUnavailable, match="the engine goes on with what it had"):
        attach(llm, server, in_place=in_place)
    assert len(resumed) == 1
    assert (llm.model.w == 1).all()
    assert llm.model.forward() == 1


def test_a_rank_in_place_may_be_one_to_rely_on(server, publish, make):
    publish(1, w=torch.ones(4, 4))
    with attach(make(w=(4, 4)), server, in_place=True, reliable=True):
        (replica,) = (each for each in tensorhub.connect(server).replicas("policy") if each.name == "rollout-0")
        assert replica.workers[0].reliable
