"""What a user of TensorHub sees: `open` a worker's `Weights`, `serve` a reference server, `connect` to look at one.

A thin, blocking wrapper over `tensorhub.aio`: the work happens in one thread of this process, and the caller's thread
only waits for it, until its timeout at the latest. An interrupt (Ctrl-C) of the waiting thread cancels the call.
"""

import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from . import aio
from .memory.registration import register as register_tensors
from .protocol.layout import Box
from .protocol.manifest import Json
from .protocol.messages import Spec
from .protocol.status import LayoutView, ReplicaView, Status, Transfer, VersionView
from .runtime.config import options_without_token, parse_seconds, server_settings
from .runtime.loops import loop_thread
from .runtime.opening import leave_on_sigterm as install_sigterm
from .runtime.serving import ServerThread

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights

T = TypeVar("T")


def open(
    model: str,
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    server: str | None = None,
    reliable: bool = True,
    site: str | None = None,
    token: str | None = None,
    insecure: bool | None = None,
    host: str | None = None,
    verify: str | None = None,
    chunk_bytes: int | str | None = None,
    transports: str | Sequence[str] | None = None,
    prefetch: str | None = None,
    retain: int | None = None,
    host_bytes: int | str | None = None,
    timeout: float | None = None,
    call_timeout: float | None = None,
) -> "Weights":
    """Join `model` as one shard of one replica, and connect to the reference server.

    What is None comes from TENSORHUB_SERVER, _SITE, _TOKEN, _INSECURE, _HOST, _VERIFY, _CHUNK_BYTES, _TRANSPORTS,
    _PREFETCH, _RETAIN, _HOST_BYTES, _CONNECT_S (`timeout`) and _TIMEOUT_S (`call_timeout`), else from its default. The
    token is the server's, by default this user's own; with `insecure` there is none. `transports` limits and orders the
    ways to move bytes, e.g. "local,tcp". `timeout` is for this call, in seconds, `call_timeout` for every later one,
    unless told otherwise. Peers read from this worker at `host`; several addresses, or interfaces ("eth0,eth1"), are
    used side by side. `reliable=False`: it may vanish at any time; others read from it, but nobody relies on it.

    `retain` is how many of the newest versions of the model are kept until all workers have left: the most that
    reliable workers ask for, 1 at least and 8 at most unless the server says otherwise. The last reliable worker to
    leave one copies it to host memory first. All its copies together take at most `host_bytes` (by default two copies
    of the shard, or `retain` + 1, if there is room at `register`; 0: none). `site` names this worker's datacenter:
    between sites each shard of a version travels once. `prefetch` says when versions are fetched into host memory
    ahead: "seed", for a site that lacks the newest one; "always", for this worker too; "never".

    Raises `ServerUnreachable`, `ShardTaken`, `Refused` (token, protocol), and `UsageError` naming a bad argument.
    """
    began = time.monotonic()
    options = options_without_token(connect_s=None if timeout is None else parse_seconds(timeout, "timeout"))
    thread = loop_thread()
    opening = aio.open(
        model,
        replica=replica,
        shard=shard,
        shards=shards,
        server=server,
        reliable=reliable,
        site=site,
        token=token,
        insecure=insecure,
        host=host,
        verify=verify,
        chunk_bytes=chunk_bytes,
        transports=transports,
        prefetch=prefetch,
        retain=retain,
        host_bytes=host_bytes,
        timeout=timeout,
        call_timeout=call_timeout,
    )
    what = f"open of {model}/{replica}[{shard}]"
    opened = thread.wait(opening, deadline=began + options.connect_s, what=what, undo=aio.Weights._leave)
    try:
        return Weights(opened)
    except BaseException:
        thread.wait(opened._leave(), deadline=began + options.connect_s, what=f"close of {what}")
        raise


class Weights:
    """One worker: one shard of one model in registered memory. Made by `open`.

    One call at a time; all shards of a replica make the same calls in the same order. Every blocking call takes
    `timeout=` in seconds (default 300 s, see `call_timeout` of `open`) and ends by then, in success or in an error.
    """

    def __init__(self, weights: aio.Weights) -> None:
        self._aio = weights
        weights._client.callers.note()

    def __repr__(self) -> str:
        return repr(self._aio)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=None if error is None else self._aio._hurry())

    # --- calls --------------------------------------------------------------------------------------------------------

    def register(
        self,
        tensors: "type_of_weights",
        *,
        dtype: "type_of_dtype | Mapping[str, type_of_dtype] | None" = None,
        boxes: Mapping[str, Sequence[Box]] | None = None,
        partial: bool = False,
        leave_out: str | Sequence[str] = (),
    ) -> None:
        """Take these tensors in place, instead of any before; nothing is copied.

        A torch module is best: its parameters and persistent buffers (of a `DTensor` the local shard), and at every
        publish and before every fill it is asked whether it still holds them; one that was replaced is a `UsageError`.
        Or torch tensors (CPU or CUDA, any dtype, dense) and numpy arrays, by name. Their memory belongs to the caller,
        who keeps it where it is, and changes it only while nothing is published or held. Raises `UsageError` naming the
        tensor that cannot be taken, `NotDrained` while a version is held.
        `dtype`: publish tensors of floating-point numbers in that dtype, rounded as torch does ("bfloat16"), or those
        that a mapping names in theirs. They become *masters*: each `publish` casts them into a buffer of this worker's,
        and only that is held and read, so masters may change outside of `publish`, `replicate` and `update`. A fill
        ends by giving them the buffer's numbers, exactly, or is refused. Raises `HostMemoryFull` without room for it.
        `boxes`: by name, which parts of which global tensors lie where in a tensor (docs/layouts.md); one not named is
        whole, a DTensor what its placements say. So replicas that are cut differently read from each other. `partial`:
        some of the model is left out on purpose; without that word such a replica is refused every version.
        `leave_out`: names, or patterns with *, of what is not registered. A module with state that only `state_dict()`
        knows (extra state, packed weights, what a hook adds) is a `UsageError` that names it, unless it is left out.
        """
        self._aio._check_process()
        registration = register_tensors(tensors, dtype, boxes, partial=partial, leave_out=leave_out)
        self._wait(self._aio.take(registration, of=tensors), None, "register()")

    def suspend(self, *, timeout: float | None = None) -> None:
        """Withdraw, and forget where the tensors are: their memory may be unmapped, freed or moved until `resume`.

        For engines that sleep. As `unpublish`, all shards of a replica call it; when it returns nobody reads, and
        nothing here keeps the memory. Until `resume` or `register` calls that need the tensors are a `UsageError`;
        copies in host memory are read and prefetched on. Does nothing while suspended. Raises as `unpublish` does.
        """
        self._wait(self._aio.suspend(timeout=timeout), timeout, "suspend()")

    def resume(self, tensors: "type_of_weights | None" = None) -> None:
        """Register again what was suspended, where it is now: the module, or the mapping with what it holds by now.

        Or these tensors, in the same layout (else `UsageError`, which names them). Afterwards they are no version:
        `replicate` fills them, `publish` takes them for what they are: after `register`, if a failed fill spoiled them.
        """
        self._aio._check_process()
        found = self._aio._client.suspension.again(tensors)
        self._wait(self._aio.take(found, of=tensors, is_resumed=True), None, "resume()")

    def publish(
        self, version: int, *, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> int:
        """Let everybody read what the tensors are now, as `version`, and promise not to change them.

        `metadata` goes with the version to everybody who gets it: a mapping of JSON values, 16 KiB at most, the same on
        all shards, verified as the tensors are. Blocks while the tensors are hashed and until all shards of the replica
        have published. Raises `VersionConflict`, `GroupMismatch`, `GroupIncomplete`, `NotDrained`, `UsageError`.
        """
        publishing = self._aio.publish(version, metadata=metadata, timeout=timeout)
        return self._wait(publishing, timeout, f"publish({version!r})")

    def unpublish(self, *, timeout: float | None = None) -> None:
        """Take the promise back: returns when nobody reads these tensors any more and they may be changed.

        Readers are moved to other holders, else awaited; those who still read after half of the timeout are cut off.
        With masters alone (`dtype` of `register`) it returns as soon as nobody new may read: the next call awaits the
        others, within this timeout, and raises what went wrong. With nothing published it does nothing. Raises
        `NotDrained` if it was to keep the last copy of what was freed: that version is withdrawn, and lost.
        """
        self._wait(self._aio.unpublish(timeout=timeout), timeout, "unpublish()")

    @contextmanager
    def mutating(
        self, *, version: int, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Iterator[None]:
        """Unpublish, let the block change the tensors, publish them as `version`.

        The number is claimed before anything is withdrawn: if it is not higher than the newest, or somebody else has
        claimed it, that is a `VersionConflict` at once, nothing was changed and the block does not run; so it is with
        tensors that a failed fill may have begun to write, a `UsageError`. Nobody else can take the number meanwhile.
        If the block raises, nothing is published: the tensors stay unpublished, the number is anybody's again, and the
        exception goes on. In the block no call may fill, publish or withdraw them (`UsageError`); `register` may change
        them. With masters alone readers of the version before are awaited after the block, not before it. `metadata` is
        that of `publish`, as it is when the block has ended. `timeout` is for each of the two calls.
        """
        what, claiming = f"mutating(version={version!r})", self._aio._claim(version, timeout, metadata)
        self._aio._block_on(claiming, timeout, what, undo=self._aio._unclaim)
        try:
            with self._aio._client.turn.block_of(version):
                yield
        except BaseException:
            self._aio._drop_claim()
            raise
        self.publish(version, metadata=metadata, timeout=timeout)

    def replicate(self, spec: Spec = "latest", *, wait: bool = False, timeout: float | None = None) -> int:
        """Fill the tensors with a version from whoever holds it, verified; afterwards this worker serves it to others.

        `spec` is a version number, "latest" or "latest-N". "latest" waits for a first version, "latest-N" for so many;
        a number waits to be published with `wait=True`, as long as no higher one was. Returns the version when all
        shards of the replica have it.
        On an error in mid-transfer the tensors are no version at all, and can only be filled again. Raises
        `VersionUnavailable`, `LayoutMismatch`, `CorruptTransfer`, `SourceLost`, `GroupIncomplete`, `GroupMismatch`.
        """
        return self._wait(self._aio.replicate(spec, wait=wait, timeout=timeout), timeout, f"replicate({spec!r})")

    def update(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """Leave the version held and replicate a newer one, if there is one. Returns the version now held.

        Cheap when nothing is newer. A number that is not newer than what is held keeps what is held; a newer one that
        does not exist is `VersionUnavailable`. "prefetched" is the newest version that every shard of this replica has
        fetched ahead, whole; while there is none the version held is kept, and nobody waits. So an update is never more
        than a local copy. It wants `prefetch="always"` on `open`, or `prefetch()` before (else `UsageError`). Errors as
        of `replicate` and `unpublish`; after one the shards may hold different versions until the next call succeeds.
        """
        return self._wait(self._aio.update(spec, timeout=timeout), timeout, f"update({spec!r})")

    def prefetch(self, spec: Spec = "latest") -> None:
        """Begin to fill a copy in host memory with that version while the tensors go on holding theirs.

        Returns at once; `update` is then a local copy, and others may read the copy meanwhile. With "latest" it follows
        the newest version until the next `update` or `replicate`. Without room under `host_bytes` nothing happens.
        Raises `UsageError` before `register()`.
        """
        self._wait(self._aio.prefetch(spec), None, f"prefetch({spec!r})")

    def pin(self, version: int, *, timeout: float | None = None) -> None:
        """Keep that version, however new others are, until `unpin` or the end of this worker.

        When this returns, no worker leaves the last reliable copy of it by its own will. Raises `VersionUnavailable` if
        nobody holds it (any more), `ServerUnreachable` if the server cannot be asked, `DeadlineExceeded`.
        """
        self._wait(self._aio.pin(version, timeout=timeout), timeout, f"pin({version!r})")

    def unpin(self, version: int, *, timeout: float | None = None) -> None:
        """Take the pin back. Does nothing where there was none."""
        self._wait(self._aio.unpin(version, timeout=timeout), timeout, f"unpin({version!r})")

    def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """Wait until the version, or a newer one, was published. Returns what there is then; changes nothing.

        "latest" waits for any version at all, "latest-N" for more than N of them. Raises `DeadlineExceeded`.
        """
        return self._wait(self._aio.wait_for(spec, timeout=timeout), timeout, f"wait_for({spec!r})")

    def wait_held(self, version: int, fraction: float = 1.0, *, timeout: float | None = None) -> tuple[str, ...]:
        """Wait until that fraction of the other replicas hold the version or a newer one. Returns their names.

        For a trainer that must not run ahead of its rollouts. Counted are replicas that have called `replicate` or
        `update`, all of whose shards live, none of which is closing, and that are no trainers: one that dies is waited
        for until its lease ends, one that starts is not waited for. Where there is none, it returns at once. Each shard
        asks for itself. Raises `DeadlineExceeded`, which says who is missing and what those hold.
        """
        what = f"wait_held({version!r}, {fraction!r})"
        return self._wait(self._aio.wait_held(version, fraction, timeout=timeout), timeout, what)

    def check(self, *, timeout: float | None = None) -> None:
        """Hash the tensors again: raises `NotDrained` naming those that were changed while they were published."""
        self._wait(self._aio.check(timeout=timeout), timeout, "check()")

    def close(self, *, timeout: float | None = None) -> None:
        """Withdraw, wait for readers, leave; the tensors are the caller's alone then. Idempotent; fit for `__del__`."""
        self._aio._close_and_wait(timeout)

    # --- how things are -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version held, whole and verified; None if there is none."""
        return self._aio.version

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version held beside its tensors, {} if nothing; None if no version is held."""
        return self._aio.metadata

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks in place, and chunks in all, of the fill under way; (0, 0) when there is none."""
        return self._aio.progress

    def statistics(self) -> dict[str, object]:
        """Counters of this worker's life: bytes received by source replica, bytes sent, reports, connections.

        Of more than 16 sources the latest are named; "(others)" is the sum of what came from those before.
        """
        return self._aio.statistics()

    def _wait(self, work: Coroutine[object, object, T], timeout: float | None, what: str) -> T:
        return self._aio._block_on(work, timeout, what)


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    insecure: bool | None = None,
    names: str | Sequence[str] | None = None,
    lease_s: float | None = None,
    report_s: float | None = None,
    fresh: bool = True,
) -> ServerThread:
    """Start a reference server inside this process: for notebooks, tests and single-node runs.

    Runs in a thread until its `close()` or the end of its `with` block; its `address` is what `open` takes as
    `server`. It begins with an empty memory: nothing that lived at this address before may still be in use. Where
    workers of an earlier server at this address may live, `fresh=False`: it hears them first, for as long as a lease.

    It asks everybody for `token` (TENSORHUB_TOKEN, or a file: TENSORHUB_TOKEN_FILE). Without one it asks for this
    user's own, which is made in the state directory (~/.local/state/tensorhub) and which this user's workers find by
    themselves. `insecure=True` (TENSORHUB_INSECURE) lets everybody in. `names` (TENSORHUB_NAMES) are those by which
    clients reach it, where that is neither an IP address nor what this machine calls itself. Raises `UsageError`.
    """
    settings = server_settings(lease_s=lease_s, report_s=report_s)
    return ServerThread(host, port, settings=settings, token=token, insecure=insecure, names=names, fresh=fresh)


def leave_on_sigterm(grace: float = 20.0) -> None:
    """On SIGTERM close every `Weights` of this process within `grace` seconds, then end as SIGTERM does.

    What only this process holds is fetched by another reliable worker first, in that time. Replaces the handler of
    SIGTERM. Raises `UsageError` outside the main thread.
    """
    install_sigterm(parse_seconds(grace, "grace"))


def connect(
    server: str | None = None,
    *,
    token: str | None = None,
    insecure: bool | None = None,
    timeout: float | None = None,
) -> "View":
    """A read-only view of a reference server: which models, versions and replicas there are, and who reads from whom.

    `token` and `insecure` are as of `open`; an insecure server looks at no token. `timeout` is for each question. Asks
    nothing.
    """
    return View(aio.connect(server, token=token, insecure=insecure, timeout=timeout))


class View:
    """What a reference server shows of itself. Each question blocks and is asked anew; nothing is kept.

    Raises `ServerUnreachable`, `Refused`.
    """

    def __init__(self, view: aio.View) -> None:
        self._aio = view

    def status(self, *, model: str = "") -> Status:
        """The whole picture, or that of one model."""
        return self._aio._block_on(self._aio.status(model=model), "status()")

    def models(self) -> list[str]:
        """Names of all models, sorted."""
        return self._aio._block_on(self._aio.models(), "models()")

    def versions(self, model: str) -> tuple[VersionView, ...]:
        """The versions known of a model, newest first; none of a model that is unknown."""
        return self._aio._block_on(self._aio.versions(model), "versions()")

    def replicas(self, model: str) -> tuple[ReplicaView, ...]:
        """The replicas of a model that live, by name."""
        return self._aio._block_on(self._aio.replicas(model), "replicas()")

    def next_version(self, model: str, *, timeout: float | None = None) -> int:
        """The number with which a restarted trainer goes on: the lowest above all that were ever taken, 0 at first.

        Taken are versions that exist or were lost, those that only some shards have published, and those that are
        claimed. Ask on one shard and tell the others. A restarted server knows what the workers that live have told
        it: it is waited for until all have, and where no worker of the model lives, it begins with 0. Raises
        `ServerUnreachable`, `DeadlineExceeded`.
        """
        return self._aio._block_on(self._aio.next_version(model, timeout=timeout), "next_version()", timeout)

    def layout(self, model: str, spec: Spec = "latest", *, timeout: float | None = None) -> LayoutView:
        """What a version is made of, for whoever has registered nothing: names, dtypes and shapes, shard by shard.

        With boxes: of the whole tensors, in one shard, as `load` gives them. Raises `VersionUnavailable`, `SourceLost`,
        `ServerUnreachable`, `DeadlineExceeded`, `UsageError`.
        """
        return self._aio._block_on(self._aio.layout(model, spec, timeout=timeout), f"layout({spec!r})", timeout)

    def metadata(self, model: str, spec: Spec = "latest", *, timeout: float | None = None) -> dict[str, Json]:
        """What the publisher of a version said beside its tensors, {} if nothing.

        Asked of a holder by `tcp`, and verified. Raises as `layout` does; `SourceLost` where none can be reached.
        """
        return self._aio._block_on(self._aio.metadata(model, spec, timeout=timeout), f"metadata({spec!r})", timeout)

    def transfers(self) -> tuple[Transfer, ...]:
        """Who reads what from whom now, and why from there."""
        return self._aio._block_on(self._aio.transfers(), "transfers()")
