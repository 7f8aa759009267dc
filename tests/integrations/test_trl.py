"""TRL's trainers publish what they train; readers have it, version by version."""

import queue
import threading

import pytest

import tensorhub

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="TRL is not installed here: make test-engines")

import numpy as np  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from tensorhub.integrations.trl import PublishingCallback, WeightTransfer  # noqa: E402

from .tiny import save_tiny_llama  # noqa: E402
from .vllm_stand_in import StandIn  # noqa: E402

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
    witness = Witness()
    with tensorhub.open("policy", replica="other", server=server) as other:
        other.register({"w": torch.zeros(3)}, boxes={})
        other.publish(41)
        train(llama, tmp_path, server, witness, max_steps=1)
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


def test_async_grpo_hands_over_what_it_trains(server, llama, tmp_path, monkeypatch):
    rollouts, engines = Rollouts(server), [StandIn() for _ in range(2)]
    transfer = WeightTransfer("policy", engines=[engine.url for engine in engines], server=server)
    trainer = async_trainer(llama, tmp_path, monkeypatch, rollouts, transfer)
    trainer.train()
    versions = [version for version, _, _, _ in rollouts.seen]
    assert sorted(set(versions)) == list(range(STEPS + 1))  # the cold sync, then one after each step
    assert [said["sync"] for _, said, _, _ in rollouts.seen] == versions
    assert all(same and whole for _, _, same, whole in rollouts.seen)
    model = copy_of(trainer.accelerator.unwrap_model(trainer.model))
    for engine in engines:
        assert all(torch.equal(engine.loaded[name], model[name]) for name in model)
        paths = [path for path, _ in engine.calls]
        one = ["/start_weight_update", "/update_weights", "/pause", "/finish_weight_update"]
        one += ["/init_weight_transfer_engine", "/update_weight_version", "/resume"]  # where ranks say what they have
        assert paths == ["/init_weight_transfer_engine", *one * (STEPS + 1)]
        assert engine.calls[0][1]["init_info"]["options"] == {"server": server}
        asked = [body["init_info"].get("loaded") for path, body in engine.calls if path == one[4]]
        assert asked == [None, *range(STEPS + 1)]
        engine.close()
    assert transfer.version is None
