"""Who drives an engine, beside a stand-in for it: a trainer in haste, and one that has not begun."""

import contextlib

import pytest
import torch

import tensorhub
from tensorhub.integrations import vllm
from tensorhub.integrations.whole import Whole

from .vllm_stand_in import StandIn


class Rank(StandIn):
    """Answers as our rank does: a fetch that fails is told when it is asked for, not by an error."""

    def __init__(self):
        super().__init__()
        self.before_fetch = lambda: None
        self.fetches = True
        self.fails = set()  # calls that the server fails at, each once
        self.is_paused = False

    def carry_out(self, path, body):
        if path in self.fails:
            self.fails.remove(path)
            raise tensorhub.Unavailable("once")
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        super().carry_out(path, body)

    def fetch(self, version):
        self.before_fetch()
        with contextlib.suppress(tensorhub.VersionUnavailable):
            return self._whole.update(version, timeout=5.0) if self.fetches else None


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.close()


@pytest.fixture
def trainer(server):
    with tensorhub.open("policy", replica="trainer", server=server, call_timeout=20, retain=1) as weights:
        tensor = torch.zeros(64)
        weights.register({"w": tensor}, boxes={})

        def step(version):
            with weights.mutating(version=version):
                tensor.fill_(float(version))

        yield step


def test_an_engine_that_joins_beside_a_trainer_in_haste_gets_what_is_newest_then(server, trainer, rank):
    """What was the newest when it asked is gone when it reads: it asks again."""
    trainer(1)
    steps = iter((2, 3))

    def goes_on():
        for version in steps:
            trainer(version)

    rank.before_fetch = goes_on
    updater = vllm.attach(rank.url, "policy", replica="r", server=server, timeout=30)
    assert updater.version == 3
    assert rank.loaded["w"].eq(3.0).all()
    assert ("/resume", {}) in rank.calls


def test_an_engine_that_leaves_frees_its_place_at_once_and_may_come_back(server, trainer, rank):
    trainer(1)
    view = tensorhub.connect(server)
    with vllm.attach(rank.url, "policy", replica="r", server=server, timeout=30) as updater:
        assert "r" in {each.name for each in view.replicas("policy")}
    assert "r" not in {each.name for each in view.replicas("policy")}
    assert updater.version == 1, "it computes with that"
    trainer(2)
    assert updater.update(timeout=30) == 2
    assert rank.loaded["w"].eq(2.0).all()


def test_a_version_that_somebody_else_of_that_name_holds_is_not_the_engines(server, trainer, rank):
    """It has left, and its name was taken meanwhile: by who has what it is told to load."""
    trainer(1)
    updater = vllm.attach(rank.url, "policy", replica="r", server=server, timeout=30)
    updater.close()
    trainer(2)
    with Whole("policy", replica="r", server=server) as other:
        assert other.update() == 2
        with pytest.raises(tensorhub.TensorHubError):
            updater.update(timeout=5)
        assert updater.version == 1
        assert rank.loaded["w"].eq(1.0).all()
    assert updater.update(timeout=30) == 2
    assert rank.loaded["w"].eq(2.0).all()


def test_who_has_left_loads_the_number_that_it_has_again():
    """Another job has begun anew, with another server at that address and other weights under that number."""
    with tensorhub.serve(lease_s=2.0, report_s=0.25) as first, published(first.address, 1.0):
        rank = Rank()
        updater = vllm.attach(rank.url, "policy", replica="r", server=first.address, timeout=30)
        assert updater.version == 0
        updater.close()
    port = int(first.address.rpartition(":")[2])
    with tensorhub.serve(port=port, lease_s=2.0, report_s=0.25) as second, published(second.address, 5.0):
        assert updater.update(timeout=30) == 0
        assert rank.loaded["w"].eq(5.0).all()
        rank.close()


def test_an_engine_that_could_not_be_told_to_go_on_is_told_again(server, trainer, rank):
    trainer(1)
    updater = vllm.attach(rank.url, "policy", replica="r", server=server, timeout=30)
    trainer(2)
    rank.fails = {"/resume"}
    with pytest.raises(tensorhub.Unavailable, match=": 500"):
        updater.update(timeout=30)
    assert rank.is_paused
    assert updater.version is None, "it does not compute"
    assert updater.update(timeout=30) == updater.version == 2
    assert not rank.is_paused
    trainer(3)
    rank.fails = {"/resume"}
    with pytest.raises(tensorhub.Unavailable, match=": 500"):
        updater.update(timeout=30)
    trainer(4)
    rank.fetches = False
    with pytest.raises(tensorhub.VersionUnavailable, match="could not fetch policy@4, and the engine goes on with 3"):
        updater.update(timeout=30)
    assert updater.version == 3
    assert not rank.is_paused
    assert [body for path, body in rank.calls if path == "/update_weight_version"][-1] == {"new_version": "3"}


def test_an_update_that_came_to_nothing_is_ended_by_the_next_or_by_leaving(server, trainer, rank):
    """vLLM begins no second update, and lets no rank leave, before it has been told to finish the first."""
    trainer(1)
    updater = vllm.attach(rank.url, "policy", replica="r", server=server, timeout=30)
    for version in (2, 3):
        trainer(version)
        rank.fails = {"/finish_weight_update"}
        with pytest.raises(tensorhub.Unavailable, match=": 500"):
            updater.update(timeout=30)
        assert updater.update(timeout=30) == updater.version == version
    trainer(4)
    rank.fails = {"/finish_weight_update"}
    with pytest.raises(tensorhub.Unavailable, match=": 500"):
        updater.update(timeout=30)
    updater.close()
    assert rank.calls[-1][0] == "/shutdown_weight_transfer_engine"
    assert rank.loaded["w"].eq(3.0).all(), "what was fetched is discarded"
    assert updater.update(timeout=30) == updater.version == 4


def test_an_update_that_vllm_has_ended_itself_is_begun_anew(server, trainer, rank):
    """It does where a rank raises while it takes in what to fetch."""
    trainer(1)
    updater = vllm.attach(rank.url, "policy", replica="r", server=server, timeout=30)
    trainer(2)
    rank.fails = {"/update_weights"}
    with pytest.raises(tensorhub.Unavailable, match=": 500"):
        updater.update(timeout=30)
    assert updater.update(timeout=30) == updater.version == 2
    assert rank.loaded["w"].eq(2.0).all()


class Llm:
    """A `vllm.LLM` with that rank, whose prefix cache cannot be reset as often as it is said."""

    def __init__(self, rank, fails):
        self.rank, self.fails, self.told, self.cached = rank, fails, [], 0
        self.llm_engine = self
        self.update_weight_version = self.told.append

    def init_weight_transfer_engine(self, body):
        self.rank.carry_out("/init_weight_transfer_engine", body)

    def start_weight_update(self):
        pass

    def update_weights(self, body):
        self.rank.carry_out("/update_weights", body)

    def finish_weight_update(self):
        self.rank.carry_out("/finish_weight_update", {})
        self.cached += 1

    def reset_prefix_cache(self, *, reset_running_requests):
        if self.fails:
            self.fails -= 1
            raise RuntimeError("once")
        self.cached = 0

    def reset_encoder_cache(self):
        pass


def test_what_was_computed_with_old_weights_is_forgotten_by_the_next_update(server, trainer, rank):
    trainer(1)
    llm = Llm(rank, fails=1)
    with pytest.raises(RuntimeError, match="once"):
        vllm.attach(llm, "policy", replica="r", server=server, timeout=30)
    updater = vllm.attach(llm, "policy", replica="r", server=server, timeout=30)
    assert llm.cached == 0
    trainer(2)
    llm.fails = 1
    with pytest.raises(RuntimeError, match="once"):
        updater.update(timeout=30)
    assert updater.update(timeout=30) == 2
    assert llm.cached == 0
    assert llm.told[-1] == "2"


@contextlib.contextmanager
def published(server, number):
    with tensorhub.open("policy", replica="trainer", server=server) as weights:
        weights.register({"w": torch.full((64,), number)}, boxes={})
        weights.publish(0)
        yield
