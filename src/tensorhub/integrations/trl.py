"""Publishes the weights that TRL trains.

    trainer = GRPOTrainer(..., callbacks=[PublishingCallback("policy", server="head:7450")])
    trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer("policy", server="head:7450"))

`PublishingCallback` publishes the model in place (`fsdp`): readers are moved away before each optimizer step and may
come back after it. `WeightTransfer` publishes a copy in host memory, of the model's size (`staged`), since TRL gathers
full tensors that do not last. Versions are numbered above all that were ever taken, also after a restart.

It must never: publish a model half of which is of another step.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

import tensorhub

from . import fsdp
from .vllm import Updater
from .vllm import attach as attach_engine
from .whole import StagedPublisher

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class WeightTransfer:
    """What `AsyncGRPOTrainer(weight_transfer=...)` takes, TRL's `WeightTransferProtocol`. It lives on the first rank.

    `engines` are addresses of vLLM servers with the weight-transfer backend "tensorhub", which are brought to each
    version; without any, rollouts update by themselves. `metadata["sync"]` counts versions of this run. `dtype` is what
    is published, e.g. `torch.bfloat16`; `options` are those of `tensorhub.open`, and engines get them too.
    """

    def __init__(
        self,
        model: str,
        *,
        replica: str = "trainer",
        engines: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self._model, self._replica, self._dtype, self._options = model, replica, dtype, options
        self._engines = tuple(engines)
        self._publisher: StagedPublisher | None = None
        self._updaters: list[Updater] = []
        self._syncs = 0

    @property
    def version(self) -> int | None:
        """The version that was published last, if it still is."""
        return self._publisher.version if self._publisher is not None else None

    def init_weight_transfer(self) -> None:
        """Join. Called once, before the first sync."""
        self._publisher = StagedPublisher(self._model, replica=self._replica, dtype=self._dtype, **self._options)

    def pause(self) -> None:
        """Does nothing: engines generate while they fetch a version. They are paused only while they load it."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish these tensors as the next version, and return when all engines generate with it."""
        if self._publisher is None:  # a trainer that trains again: TRL has joined once, and left at the end of training
            try:
                self.init_weight_transfer()
            except BaseException:
                for _ in iterator:  # the other ranks gather with it, and would wait
                    pass
                raise
        assert self._publisher is not None, "made above"
        version = self._publisher.publish(iterator, {"sync": self._syncs})
        self._syncs += 1
        for updater in self._updaters:
            updater.update(version)
        for number in range(len(self._updaters), len(self._engines)):
            name = f"{self._replica}-engine-{number}"
            self._updaters.append(attach_engine(self._engines[number], self._model, replica=name, **self._options))

    def resume(self) -> None:
        """Does nothing: see `pause`."""

    def destroy(self) -> None:
        """Leave; what is sent later joins again. The last version stays where rollouts hold it."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


class _LeftOver(Exception):
    """Training was left in the middle of a step, which now fails."""


class PublishingCallback(TrainerCallback):
    """For `GRPOTrainer`, and any other `Trainer`: the model as it is before the first step, then after each.

    On all ranks. `metadata["step"]` is the trainer's step; what it begins with has none. `options` are those of
    `fsdp.attach`: dtype, and what `tensorhub.open` takes. A trainer whose training has raised may train again: a step
    that it was in publishes nothing.
    """

    def __init__(self, model: str, *, replica: str = "trainer", **options: Any) -> None:
        self._model, self._options = model, {"replica": replica, "fill": False, **options}
        self._step = ExitStack()
        self.publisher: fsdp.Publisher | None = None

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Join, and publish what training begins with. First ends what a training has left that raised."""
        self._end()
        if getattr(args, "load_best_model_at_end", False):  # over what is published, and no callback comes before
            text = "load_best_model_at_end=True changes the model while its last step is published"
            raise tensorhub.UsageError(
                text, hint="leave it out, and load and publish the best checkpoint after training"
            )
        self.publisher = fsdp.attach(known["model"], self._model, **self._options)

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """No reader reads the parameters when this returns."""
        assert self.publisher is not None
        self._step.enter_context(self.publisher.step(metadata={"step": state.global_step + 1}))

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Publish what the step has made of them."""
        self._step.close()

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Leave. The last version stays where rollouts hold it."""
        self._end()

    def _end(self) -> None:
        """A trainer that raises tells no callback: the step may be open, and the publisher joined."""
        step, self._step = self._step, ExitStack()
        publisher, self.publisher = self.publisher, None
        with suppress(_LeftOver), step:
            raise _LeftOver("a step that training has not ended")
        if publisher is not None:
            publisher.close()
