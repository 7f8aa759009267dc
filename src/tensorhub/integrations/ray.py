"""TensorHub on a Ray cluster: the reference server is a named actor, and actors find it through Ray.

    start_server()                                      # once, in the driver: returns the address
    weights = open_in_actor("policy", reliable=False)   # in any actor: server, host and replica come from Ray

1. The server runs on the node of the process that started it, and stays there. After a crash Ray starts it again at the
   same address, and it learns from the workers what they hold. It lasts as long as the driver, unless `detached`.
2. `host` is the address of the actor's node, on which peers of other nodes reach it.
3. A replica's name is that of the actor with something new after it, for an actor that Ray has started again is another
   process: the name of the one that was killed is taken until its lease ends.

It must never: carry tensors through Ray's object store.
"""

import contextlib
import secrets
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tensorhub

SERVER = "tensorhub-server"  # the actor's name
START_S = 60.0

_kept: dict[str, Any] = {}  # by name: an actor that is not detached ends with its starter's handle


class ReferenceServer:
    """The actor. Where Ray has started it again, it waits for the workers that knew the one before."""

    def __init__(self, host: str, port: int, settings: dict[str, Any]) -> None:
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._server = tensorhub.serve(host, port, fresh=not again, **settings)

    def address(self) -> str:
        """The address at which the server listens."""
        return self._server.address

    def token(self) -> str:
        """The token that its workers send. Each caller of this cluster's actors may have it."""
        return self._server.token


def start_server(
    *, name: str = SERVER, port: int = 0, detached: bool = False, timeout: float = START_S, **settings: Any
) -> str:
    """Start the reference server on this node, unless an actor of this name runs already. Returns its address.

    `settings` are those of `tensorhub.serve`: token, insecure, lease_s, … Port 0 takes a free one, and keeps it.
    """
    with contextlib.suppress(tensorhub.ServerUnreachable):
        return server_address(name=name, timeout=timeout)
    context = ray.get_runtime_context()
    host = ray.util.get_node_ip_address()
    actor = (
        ray.remote(ReferenceServer)
        .options(
            name=name,
            get_if_exists=True,
            lifetime="detached" if detached else None,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
        )
        .remote(host, port or _free_port(host), settings)
    )
    _kept[name] = actor
    return str(ray.get(actor.address.remote(), timeout=timeout))


def server_address(*, name: str = SERVER, namespace: str | None = None, timeout: float = START_S) -> str:
    """Where the reference server of that name listens. Raises `ServerUnreachable` if Ray knows none."""
    return str(ray.get(_actor(name, namespace).address.remote(), timeout=timeout))


def _actor(name: str, namespace: str | None = None) -> Any:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        hint = "call tensorhub.integrations.ray.start_server() first, in the same namespace"
        raise tensorhub.ServerUnreachable(f"there is no actor {name!r}", hint=hint) from error


def placed(*, replica: str | None = None, name: str = SERVER, **options: Any) -> dict[str, Any]:
    """The arguments of `tensorhub.open` in this actor, or driver: those given, and from Ray what is not."""
    chosen = replica or f"{_own_name()}-{secrets.token_hex(4)}"
    if not options.get("server"):
        options["server"] = server_address(name=name)
        if options.get("token") is None and options.get("insecure") is None:  # other hosts have no file with the token
            token = str(ray.get(_actor(name).token.remote(), timeout=START_S))
            options |= {"token": token} if token else {"insecure": True}
    return {**options, "replica": chosen, "host": options.get("host") or ray.util.get_node_ip_address()}


def open_in_actor(model: str, *, replica: str | None = None, name: str = SERVER, **options: Any) -> tensorhub.Weights:
    """Calls `tensorhub.open`; server, host and replica come from Ray. All shards of a replica give its name."""
    return tensorhub.open(model, **placed(replica=replica, name=name, **options))


def _own_name() -> str:
    context = ray.get_runtime_context()
    if context.worker.mode == ray.WORKER_MODE and context.get_actor_id():
        return context.get_actor_name() or f"actor-{context.get_actor_id()[:12]}"
    return "driver"


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
