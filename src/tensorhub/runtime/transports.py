"""The transports that a worker can have, best first. A new one is one more entry of `TRANSPORTS`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..protocol.errors import TransportMissing
from ..transport.base import Transport
from ..transport.local.transport import LocalSettings, LocalTransport
from ..transport.nixl import agent
from ..transport.tcp.settings import TcpSettings
from ..transport.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from .config import Options

_log = logging.getLogger(__name__)


def _always() -> tuple[bool, str]:
    return True, ""


@dataclass(frozen=True)
class Kind:
    """What the package knows of one transport beside its scheme."""

    make: (
        "Callable[[str, Options, float], Transport]"  # with the worker's host, and how long to try a library that hangs
    )
    use: str  # for `tensorhub doctor`: between which workers
    is_default: Callable[[], tuple[bool, str]] = (
        _always  # (a worker has it unless others are named, for what or why not)
    )
    is_networked: bool = False  # its endpoints are `scheme://address:port,…`, to which readers connect
    remedy: str = ""  # for `tensorhub doctor`: what to do where the transport ends its process and says nothing


def has_kernels() -> bool:
    """The package cuda-core is here (extra `cuda`)."""
    return find_spec("cuda") is not None and find_spec("cuda.core") is not None


def _cuda(host: str, options: "Options", probe_s: float) -> Transport:
    from ..transport.cuda import CudaSettings, CudaTransport

    if not agent.has_gpu():
        raise TransportMissing(NO_GPU, hint="tensors on the host go by local and tcp")
    return CudaTransport(CudaSettings(token=options.token or None, device_share=options.device_share))


def _can_cuda() -> tuple[bool, str]:
    if not agent.has_gpu():
        return False, NO_GPU
    return (True, "") if has_kernels() else (False, "the extra `cuda` is not installed")


def _local(host: str, options: "Options", probe_s: float) -> Transport:
    return LocalTransport(LocalSettings(token=options.token or None, allow_readers=options.ptrace))


def _nixl(host: str, options: "Options", probe_s: float) -> Transport:
    from ..transport.nixl.transport import NixlSettings, NixlTransport

    port, token = options.data_port or 0, options.token or None
    return NixlTransport(NixlSettings(host=host, port=port, token=token, probe_s=probe_s))


def _tcp(host: str, options: "Options", probe_s: float) -> Transport:
    return TcpTransport(TcpSettings(host=host, port=options.data_port or 0, token=options.token or None))


NO_GPU = "no NVIDIA device is here"

# from device to device of one host; on one host nothing else beats local; then RDMA and NVLink; tcp always
TRANSPORTS = {
    "cuda": Kind(_cuda, "two workers of one host, tensors on a GPU", _can_cuda),
    "local": Kind(_local, "two workers of one host"),
    "nixl": Kind(
        _nixl,
        "RDMA, NVLink, CUDA IPC",
        lambda: agent.advantage(),
        is_networked=True,
        remedy="TENSORHUB_TRANSPORTS=local,tcp goes without it",
    ),
    "tcp": Kind(_tcp, "any two hosts", is_networked=True),
}


def wanted_transports(options: "Options") -> tuple[str, ...]:
    """The transports that were named, or else those that are worth having here."""
    if options.transports:
        return options.transports
    found = []
    for scheme, kind in TRANSPORTS.items():
        is_default, why = kind.is_default()
        if is_default:
            found.append(scheme)
        else:
            _log.debug("no %s transport by default: %s", scheme, why)
    return tuple(found)
