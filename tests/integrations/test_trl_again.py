"""A training with `PublishingCallback` raises, and the same trainer trains again. It is transformers' own `Trainer`."""

from unittest import mock

import pytest

import tensorhub

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed here: make test-engines")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from tensorhub.integrations.trl import PublishingCallback  # noqa: E402

STEPS, FAILS = 4, 2


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
