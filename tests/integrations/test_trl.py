"""TRL's trainers publish what they train; readers have it, version by version."""

import queue
import threading
from typing import ClassVar
from unittest import mock

import pytest

import tensorhub

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="TRL is not installed here: make test-engines")

import numpy as np  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from tensorhub.integrations.trl import PublishingCallback, WeightTransfer  # noqa: E402
from tensorhub.integrations.whole import Whole  # noqa: E402

from .llama import save_tiny_llama  # noqa: E402

STEPS = 4


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def copy_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


def settings(kind, folder, **more):
    options = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 8,
        "learning_rate": 0.01,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return kind(**{**options, **more})


class Witness(TrainerCallback):
    """Comes after ours, and keeps what each step has made of the model."""

    def __init__(self):
        self.models = {}

    def on_train_begin(self, args, state, control, model, **_):
        self.models[state.global_step] = copy_of(model)

    def on_step_end(self, args, state, control, model, **_):
        self.models[state.global_step] = copy_of(model)


class Reader(threading.Thread):
    """A rollout beside the training: takes each version that it can get, and keeps a copy."""

    def __init__(self, address, like):
        super().__init__()
        self.model = {name: torch.zeros_like(tensor) for name, tensor in sorted(like.items())}
        self.weights = tensorhub.open("policy", replica="rollout", server=address)  # to whom the trainer may leave
        self.weights.register(self.model, boxes={})
        self.versions, self.error = {}, None

    def run(self):
        try:
            version = self.weights.replicate("latest", timeout=60)
            while True:
                copied = {name: tensor.clone() for name, tensor in self.model.items()}
                self.versions[version] = (copied, self.weights.metadata)
                if version >= STEPS:
                    return
                self.weights.wait_for(version + 1, timeout=60)
                version = self.weights.update("latest", timeout=60)
        except tensorhub.TensorHubError as error:
            self.error = error


def train(llama, tmp_path, address, witness, **more):
    dataset = Dataset.from_dict({"prompt": ["abc", "xyz", "a1b2", "hello"] * 4})
    trainer = GRPOTrainer(
        model=llama,
        reward_funcs=reward,
        args=settings(GRPOConfig, tmp_path, **more),
        train_dataset=dataset,
        callbacks=[PublishingCallback("policy", server=address), witness],
    )
    trainer.train()
    return trainer


def test_grpo_publishes_each_step_in_place(server, llama, tmp_path):
    from transformers import AutoModelForCausalLM

    witness = Witness()
    reader = Reader(server, AutoModelForCausalLM.from_pretrained(llama).state_dict())
    reader.start()
    train(llama, tmp_path, server, witness)
    reader.join(60)
    assert reader.error is None
    assert len(witness.models) == STEPS + 1
    changed = [name for name in witness.models[0] if not torch.equal(witness.models[0][name], witness.models[1][name])]
    assert changed, "nothing was trained"
    assert STEPS in reader.versions
    for version, (tensors, metadata) in reader.versions.items():
        assert metadata == ({"step": version} if version else {})
        for name, tensor in tensors.items():
            assert torch.equal(tensor, witness.models[version][name]), f"{name} of version {version}"
    reader.weights.close()


def test_a_trainer_that_begins_again_goes_on_above_its_old_versions(server, llama, tmp_path):
    with tensorhub.open("policy", replica="other", server=server) as other:
        other.register({"w": torch.zeros(3)}, boxes={})
        other.publish(41)
    train(llama, tmp_path, server, Witness(), max_steps=1)
    assert tensorhub.connect(server).next_version("policy") == 44  # 42 before the first step, 43 after it


class Rollouts:
    """TRL's `RolloutWorkerProtocol`: samples of random letters, and what could be read when a version was announced."""

    def __init__(self, address):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.address, self.trainer, self.seen, self.error = address, None, [], None

    def start(self):
        self._look()
        self.refill(0)

    def stop(self):
        pass

    def check_health(self, stale_after_s):
        pass

    def update_model_version(self, model_version):
        self._look()
        self.refill(model_version)

    def _look(self):
        loaded = tensorhub.load("policy@latest", server=self.address)
        model = copy_of(self.trainer.accelerator.unwrap_model(self.trainer.model))
        same = all(torch.equal(loaded[name], model[name]) for name in loaded)
        self.seen.append((loaded.version, loaded.metadata, same, sorted(loaded) == sorted(model)))

    def refill(self, model_version):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        random = np.random.default_rng(model_version)
        for index in range(64):
            tokens = random.integers(3, 30, size=12)
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[{"role": "user", "content": "abc"}],
                    completion=[{"role": "assistant", "content": "xyz"}],
                    input_ids=tokens,
                    completion_mask=np.array([0] * 4 + [1] * 8),
                    old_log_probs=np.full(12, -3.0, dtype=np.float32),
                    advantage=float(random.normal()),
                    model_version=model_version,
                    group_id=1000 * model_version + index,
                    metrics={},
                )
            )


def async_trainer(llama, tmp_path, monkeypatch, rollouts, transfer):
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    # For a CPU: it asks CUDA for the device's name, to report how busy that is, and its attention is a kernel for GPUs.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)
    monkeypatch.setattr(async_grpo_trainer, "TREE_ATTENTION", "sdpa")
    rollouts.trainer = AsyncGRPOTrainer(
        model=llama,
        reward_funcs=reward,
        args=settings(AsyncGRPOConfig, tmp_path, weight_sync_steps=1, token_budget=128),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "abc"}]] * 64}),
        rollout_worker=rollouts,
        weight_transfer=transfer,
    )
    return rollouts.trainer


class Engine:
    """In place of one of vLLM's, and what drives it."""

    made: ClassVar = []

    def __init__(self, url, model, *, replica, **options):
        self.url, self.whole, self.asked = url, Whole(model, replica=replica, **options), []
        self.made.append(self)
        self.update("latest")

    def update(self, version):
        self.asked.append(version)
        self.whole.update(version)


def test_async_grpo_hands_over_what_it_trains(server, llama, tmp_path, monkeypatch):
    monkeypatch.setattr("tensorhub.integrations.trl.attach_engine", Engine)
    rollouts, urls = Rollouts(server), ["http://one", "http://two"]
    transfer = WeightTransfer("policy", engines=urls, server=server)
    trainer = async_trainer(llama, tmp_path, monkeypatch, rollouts, transfer)
    trainer.train()
    versions = [version for version, _, _, _ in rollouts.seen]
    assert sorted(set(versions)) == list(range(STEPS + 1))  # the cold sync, then one after each step
    assert [said["sync"] for _, said, _, _ in rollouts.seen] == versions
    assert all(same and whole for _, _, same, whole in rollouts.seen)
    model = copy_of(trainer.accelerator.unwrap_model(trainer.model))
    assert [engine.url for engine in Engine.made] == urls
    for engine in Engine.made:
        held = dict(engine.whole)
        assert all(torch.equal(held[name], model[name]) for name in model)
        assert engine.asked == ["latest", *range(1, STEPS + 1)]
        engine.whole.close(timeout=5)
    assert transfer.version is None


FAILS = 2


class Model(torch.nn.Module):
    """One layer, whose forward pass may raise."""

    fails = False

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x=None, labels=None):
        if self.fails:
            raise RuntimeError("out of memory")
        found = self.layer(x)
        return {"loss": (found.squeeze(-1) - labels).square().mean(), "logits": found}


class Optimizer(torch.optim.SGD):
    """One that may raise when half of the parameters are changed."""

    fails = False

    def step(self, *arguments, **options):
        if self.fails:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(7.0)
            raise RuntimeError("out of memory")
        return super().step(*arguments, **options)


class Failing(TrainerCallback):
    """Before step FAILS something begins to raise. Once nothing does, a rollout reads what the last step has made."""

    def __init__(self, what, rollout):
        self.what, self.rollout, self.made = what, rollout, None

    def on_step_begin(self, args, state, control, **_):
        if self.what is not None and state.global_step + 1 == FAILS:
            self.what.fails = True

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step == STEPS:
            self.made = {name: each.clone() for name, each in model.state_dict().items()}
            self.rollout.replicate("latest", timeout=20)  # ours has published it before


@pytest.mark.parametrize("where", ["optimizer", "forward"])
def test_a_training_that_raised_is_begun_again(server, tmp_path, where):
    model = Model()
    optimizer = Optimizer(model.parameters(), lr=0.01)
    read = {name: torch.zeros_like(each) for name, each in sorted(model.state_dict().items())}
    with tensorhub.open("policy", replica="rollout", server=server) as rollout:
        rollout.register(read, boxes={})
        ours = PublishingCallback("policy", server=server, call_timeout=20)
        failing = Failing(optimizer if where == "optimizer" else model, rollout)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=STEPS, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(64)],
            callbacks=[ours, failing],
            optimizers=(optimizer, None),
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
        failing.what.fails, failing.what = False, None
        trainer.train()
        assert ours.publisher is None
        before = 2  # versions of the training that raised: how it began, and its only whole step
        assert rollout.version == before + STEPS, "nothing of the step that raised was published"
        assert rollout.metadata == {"step": STEPS}
        assert all(torch.equal(read[name], each) for name, each in failing.made.items())
        assert [each.name for each in tensorhub.connect(server).replicas("policy")] == ["rollout"]


def test_a_training_that_would_load_other_weights_over_what_is_published_is_refused(server):
    """Transformers loads the best model before it tells anybody that training ends."""
    callback = PublishingCallback("policy", server=server)
    with pytest.raises(tensorhub.UsageError, match="load_best_model_at_end=True changes the model"):
        callback.on_train_begin(mock.Mock(load_best_model_at_end=True), None, None, model=Model())
    assert callback.publisher is None
