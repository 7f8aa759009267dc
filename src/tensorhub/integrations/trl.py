"""TRL trains, and everybody else reads its weights over TensorHub.

    trainer = GRPOTrainer(..., callbacks=[PublishingCallback("policy", server="head:7450")])
    trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer("policy", server="head:7450"))

`PublishingCallback` publishes the model in place: readers are moved away before each optimizer step and may come back
after it. `WeightTransfer` publishes a copy in host memory, of the model's size, since TRL gathers full tensors that do
not last. Both say with a version what it is, as `metadata["step"]` or `metadata["sync"]`, and number versions above all
that were ever taken, also after a restart.

It must never: publish a model half of which is of another step.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import tensorhub

from .staged import StagedPublisher

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

UpdateInfo = Callable[[int], dict[str, Any]]


class WeightTransfer:
    """What `AsyncGRPOTrainer(weight_transfer=...)` takes, TRL's `WeightTransferProtocol`. It lives on the first rank.

    `client` is TRL's `VLLMClient` of a server with the weight-transfer backend "tensorhub", or anything with its
    methods: it is paused, told to update and resumed. Without one, rollouts update by themselves. `init_info` and
    `update_info` are what the server's backend is told, the latter made from a version's number. `dtype` is what is
    published, e.g. `torch.bfloat16`. `options` are those of `tensorhub.open`.
    """

    def __init__(
        self,
        model: str,
        *,
        replica: str = "trainer",
        client: Any = None,
        init_info: dict[str, Any] | None = None,
        update_info: UpdateInfo = lambda version: {"version": version},
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self._model, self._options = model, {"replica": replica, "dtype": dtype, **options}
        self._client, self._init_info, self._update_info = client, init_info or {}, update_info
        self._publisher: StagedPublisher | None = None
        self._syncs = 0

    @property
    def version(self) -> int | None:
        """The version that was published last, if it still is."""
        return self._publisher.version if self._publisher is not None else None

    def init_weight_transfer(self) -> None:
        """Join. Called once, before the first sync."""
        self._publisher = StagedPublisher(self._model, **self._options)
        if self._client is not None:
            self._client.wait_for_server_ready()
            self._client.init_weight_transfer_engine(self._init_info)

    def pause(self) -> None:
        """Let the server, if there is one, freeze what it generates."""
        if self._client is not None:
            self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish these tensors as the next version, and let the server fetch it. Blocks until both are done."""
        assert self._publisher is not None, "init_weight_transfer() comes first"
        version = self._publisher.publish(iterator, {"sync": self._syncs})
        self._syncs += 1
        if self._client is not None:
            self._client.start_weight_update()
            self._client.update_weights(self._update_info(version))
            self._client.finish_weight_update()

    def resume(self) -> None:
        """The other half of `pause`."""
        if self._client is not None:
            self._client.resume()

    def destroy(self) -> None:
        """Leave. The last version stays where rollouts hold it. Called when training ends."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


class PublishingCallback(TrainerCallback):
    """For `GRPOTrainer`, and any other `Trainer`: the model as it is before the first step, then after each.

    With FSDP2 each rank publishes its shard; otherwise the first rank does. `options` are those of `tensorhub.open`.
    """

    def __init__(self, model: str, *, replica: str = "trainer", **options: Any) -> None:
        self._model, self._replica, self._options = model, replica, options
        self.weights: tensorhub.Weights | None = None
        self._first = 0  # the version that step 0 would have

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Join, and publish what training begins with."""
        module = known["model"]
        while hasattr(module, "module"):  # DistributedDataParallel and the like
            module = module.module
        is_cut = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        shard, shards = (args.process_index, args.world_size) if is_cut else (0, 1)
        self._first = self._agreed(args) - state.global_step
        if is_cut or state.is_world_process_zero:
            self.weights = tensorhub.open(
                self._model, replica=self._replica, shard=shard, shards=shards, **self._options
            )
            self.weights.register(module)
            self._publish(state)

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Nobody reads the parameters when this returns."""
        if self.weights is not None:
            self.weights.unpublish()

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Publish what the step has made of them."""
        if self.weights is not None:
            self._publish(state)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **known: Any
    ) -> None:
        """Leave. The last version stays where somebody holds it."""
        if self.weights is not None:
            self.weights.close()
            self.weights = None

    def _publish(self, state: "TrainerState") -> None:
        assert self.weights is not None
        self.weights.publish(self._first + state.global_step, metadata={"step": state.global_step})

    def _agreed(self, args: "TrainingArguments") -> int:
        """The first version, which the first rank asks for and tells the others."""
        view = tensorhub.connect(self._options.get("server"), token=self._options.get("token"))
        number = view.next_version(self._model) if args.process_index == 0 else 0
        if args.world_size > 1:
            told = torch.tensor([number], device=args.device)
            torch.distributed.broadcast(told, src=0)
            number = int(told.item())
        return number
