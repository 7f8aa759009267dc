"""As much of vLLM as our half in its ranks asks for: one rank on a CPU, without layers that want processing."""

import contextlib
import importlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

OURS = ("vllm_worker",)  # of tensorhub.integrations: it imports vLLM


class Generic:
    """A base class that takes types."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


class TransferEngine(Generic):
    """vLLM's base class of what lives in a rank."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.vllm_config, self.device, self.model = vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)


def info_of(layer: torch.nn.Module) -> SimpleNamespace:
    """What vLLM has noted of a layer before it processed it: here nothing is processed."""
    metas = {name: each.data.to("meta") for name, each in layer._parameters.items() if each is not None}
    return SimpleNamespace(restore_metadata=(metas, {}), reset=lambda: None)


def default_weight_loader(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    assert parameter.shape == tensor.shape
    parameter.data.copy_(tensor)


def modules() -> dict[str, dict[str, Any]]:
    """By name, and what is imported from them."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0], cpu_group=None)
    return {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda _: contextlib.nullcontext(), "VllmConfig": object},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: group},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": TransferEngine,
            "WeightTransferInitInfo": type("InitInfo", (), {}),
            "WeightTransferUpdateInfo": type("UpdateInfo", (), {}),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda _: False},
        "vllm.model_executor.layers.quantization": {},
        "vllm.model_executor.layers.quantization.base_config": {"QuantizeMethodBase": type("Method", (), {})},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda _: None,
            "finalize_layerwise_reload": lambda *_: None,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {"get_layerwise_info": info_of},
        "vllm.model_executor.model_loader.reload.meta": {
            "SKIP_LOAD_TENSORS": set(),
            "SKIP_MODULES": set(),
            "SKIP_TENSORS": set(),
            "to_meta_tensor": lambda tensor: tensor.to("meta"),
        },
        "vllm.model_executor.model_loader.reload.sanitize": {"restore_layer_refs": lambda tensor, _: tensor},
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": default_weight_loader},
    }


class Model(torch.nn.Module):
    """Parameters of these shapes, all -1. Its loader leaves out what it has no parameter for."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            if name in mine:
                getattr(mine[name], "weight_loader", default_weight_loader)(mine[name], tensor)

    def forward(self) -> int:
        return 1

    def compute_logits(self) -> int:
        return 1


class LLM:
    """What drives the one rank, as `vllm.LLM` does: no update begins, and no rank leaves, before one has ended."""

    def __init__(self, engine: type, model: Model) -> None:
        parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_size=1, distributed_executor_backend="uni")
        config = SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32), additional_config=None
        )
        self.model, self.said, self.is_updating = model, "", False
        self.rank = engine(SimpleNamespace(), config, torch.device("cpu"), model)
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.rank.init_transfer_engine(self.rank.parse_init_info(request["init_info"]))

    def start_weight_update(self) -> None:
        assert not self.is_updating
        self.rank.start_weight_update()
        self.is_updating = True

    def update_weights(self, request: dict[str, Any]) -> None:
        assert self.is_updating
        self.rank.update_weights(request["update_info"])

    def finish_weight_update(self) -> None:
        assert self.is_updating
        self.rank.finish_weight_update()
        self.is_updating = False

    def update_weight_version(self, version: str) -> None:
        self.said = version

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None: ...

    def collective_rpc(self, name: str) -> None:
        assert not self.is_updating
        self.rank.shutdown()


class Server:
    """An LLM behind HTTP, as vLLM serves it: notes (path, body), and fails once at each path of `fails`."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.calls, self.is_paused, ours = llm, [], False, self
        self.fails: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.split("?")[0]
                try:
                    ours.carry_out(path, body)
                    self.send_response(200)
                except Exception as error:  # noqa: BLE001 - its client judges it
                    if path == "/update_weights":  # as vLLM 0.32 does: that ends the update
                        llm.is_updating = False
                    self.send_response(500, str(error))
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def carry_out(self, path: str, body: dict[str, Any]) -> None:
        self.calls.append((path, body))
        if path in self.fails:
            self.fails.remove(path)
            raise RuntimeError("once")
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        elif path == "/update_weight_version":
            self.llm.update_weight_version(body["new_version"])
        elif path == "/shutdown_weight_transfer_engine":
            self.llm.collective_rpc(path)
        else:
            getattr(self.llm, path[1:])(*([body] if body else []))

    def close(self) -> None:
        self.llm.rank.shutdown()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def pretended() -> Any:
    """Our half over this: `make(w=(4, 4))` is an `LLM` with such a model. Afterwards all is as it was before."""
    names = [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
    names += [f"tensorhub.integrations.{name}" for name in OURS if f"tensorhub.integrations.{name}" in sys.modules]
    before = {name: sys.modules.pop(name) for name in names}
    try:
        for name, attributes in modules().items():
            module = sys.modules[name] = ModuleType(name)
            module.__path__ = []
            module.__dict__.update(attributes)
        worker = importlib.import_module("tensorhub.integrations.vllm_worker")
        worker.LEAVE_S = 1.0  # an engine is not waited for longer, though its version has no other holder
        yield lambda **shapes: LLM(worker.TensorHubWeightTransferEngine, Model(**shapes))
    finally:
        ours = [f"tensorhub.integrations.{name}" for name in OURS]
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.") or name in ours]:
            del sys.modules[name]
        sys.modules.update(before)
