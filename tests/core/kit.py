"""Short ways to make the values that the rules of the core are about."""

from tensorhub.core.manifest import Layout, TensorSpec
from tensorhub.core.messages import PROTOCOL, Grant, Hello, Operation, Report
from tensorhub.core.names import Digest, Ticket, Version, WorkerId, worker_id
from tensorhub.core.selection import Candidate

LAYOUT = Layout((TensorSpec("w", "float32", (4,), (1,), 0, 16),), 16)


def worker(replica: str, shard: int = 0, model: str = "policy") -> WorkerId:
    return worker_id(model, replica, shard)


def hello(who: WorkerId, *, shards: int = 1, life: str = "1", host: str = "") -> Hello:
    return Hello(PROTOCOL, who.model, who.replica, who.shard, shards, life, endpoints=("x://1",), host=host)


def grant(ticket: int, *, source: WorkerId | None = None, version: int = 1, root: str = "r") -> Grant:
    return Grant(Ticket(ticket), Version(version), Digest(root), source or worker("trainer"), (), "because")


def candidate(
    replica: str,
    *,
    load: int = 0,
    done: int | None = None,
    published: bool = False,
    is_withdrawing: bool = False,
    is_doubtful: bool = False,
    is_near: bool = False,
    is_same_site: bool = True,
    avoided_until: float = float("-inf"),
    leaving_site: int = 0,
) -> Candidate:
    """A candidate source; whole unless `done` chunks are named."""
    return Candidate(
        worker=worker(replica),
        load=load,
        is_full=done is None,
        done=done or 0,
        published=published,
        is_withdrawing=is_withdrawing,
        is_doubtful=is_doubtful,
        is_near=is_near,
        is_same_site=is_same_site,
        avoided_until=avoided_until,
        leaving_site=leaving_site,
    )


def told(number: int, verb: str = "update", spec: int | str = "latest", **more: object) -> Operation:
    return Operation(number, verb, spec, **more)  # type: ignore[arg-type]


def report(number: int, **more: object) -> Report:
    return Report(number, **more)  # type: ignore[arg-type]
