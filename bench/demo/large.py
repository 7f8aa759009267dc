"""The demo with a model of 1 GiB and eight rollouts: each version goes from the trainer to all of them over loopback.

Weights are bytes that change with every version. In one version a rollout that others read from is killed. Each
rollout's bytes are hashed when its call has returned, and compared with the hash of the trainer's.
"""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import tensorhub
from tensorhub.protocol.errors import UsageError

from ..machine import available_bytes
from ..processes import Child, Failed, Server, kill_all
from ..section import MIB, size_text
from .events import TRAINER
from .large_report import show_large, write_large
from .large_summary import UNDISTURBED, Fetch, Kill, Large, Round, judge, kill_of
from .parent import ended_in_order

MODEL = "policy"
MAX_TRIES = 20  # versions in which that is tried: a small model may be there before anything could be killed
KILL_AT = 0.2  # of the model, in place at a reader of what is killed
SAMPLE_S = 0.01
MAX_CHUNK_BYTES = 4 * MIB
MIN_MIB = 16
CHUNKS = 64  # of a smaller model smaller chunks, so that rollouts pass them on while they fill
SPARE_COPIES = 3  # the trainer's tensors and host copies, in models
PROCESS_BYTES = 100 * MIB  # Python and what it loads
CALL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LargeOptions:
    """What a user can choose."""

    size_mib: int = 1024
    rollouts: int = 8
    out: Path = Path("out/demo")

    @property
    def size_bytes(self) -> int:
        return self.size_mib * MIB

    @property
    def needed_bytes(self) -> int:
        return (self.rollouts + SPARE_COPIES) * self.size_bytes + (self.rollouts + 2) * PROCESS_BYTES


def run_large(options: LargeOptions) -> int:
    """Run it, write the page, print a table. Returns the exit status: 0 if every check holds."""
    if options.rollouts < 3 or options.size_mib < MIN_MIB:
        raise UsageError(f"it needs at least 3 rollouts, of which one is killed, and {MIN_MIB} MiB")
    if options.needed_bytes > available_bytes():
        needed, found = size_text(options.needed_bytes), size_text(available_bytes())
        raise UsageError(f"it needs {needed} of memory, and {found} are free", hint="--size 256, or fewer --rollouts")
    console = Console()
    size = size_text(options.size_bytes)
    text = f"a reference server, a trainer and {options.rollouts} rollouts, each a process with a model of {size}"
    console.print(text, highlight=False, soft_wrap=True)
    try:
        with ended_in_order():
            large = _run(options, console)
    except Failed as error:
        console.print("[red]the demo failed:[/]", escape(str(error)), highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process of the demo was ended")
        return 130
    finally:
        kill_all()
    checks = judge(large)
    show_large(console, large, checks, write_large(options.out, large, checks))
    return 0 if all(check.holds for check in checks) else 1


def _run(options: LargeOptions, console: Console) -> Large:
    began = time.monotonic()
    rounds: list[Round] = []
    kill: Kill | None = None
    cluster = _Cluster(options)
    while kill is None and len(rounds) < UNDISTURBED + MAX_TRIES:
        _tell(console, cluster.round(is_killing=len(rounds) >= UNDISTURBED), rounds)
        if cluster.lost is not None:
            kill = kill_of(*cluster.lost, rounds)
    if kill is not None:
        _tell(console, cluster.round(), rounds)
    return Large(options.size_bytes, options.rollouts, time.monotonic() - began, rounds, kill)


def _tell(console: Console, one: Round, rounds: list[Round]) -> None:
    rounds.append(one)
    text = f"version {one.version}: {len(one.fetches)} rollouts have it after {one.seconds:.2f} s"
    console.print(text, highlight=False)


class _Cluster:
    """The processes, and what is done with them."""

    def __init__(self, options: LargeOptions) -> None:
        self._size_bytes = options.size_bytes
        self._version, self._sent_bytes = 0, 0
        self._peaks: dict[str, int] = {}
        self.lost: tuple[str, float, dict[str, float]] | None = (
            None  # that was killed, when, its readers with their shares
        )
        self._server = Server()
        self._trainer = Child(TRAINER)
        self._rollouts = {name: Child(name) for name in (f"rollout-{i}" for i in range(options.rollouts))}
        for child in self._all():
            child.wait_started()
        allocated = [
            child.ask("allocate", size_bytes=options.size_bytes, seed=int(child is self._trainer))
            for child in self._all()
        ]
        for each in allocated:
            each.result()
        self._view = tensorhub.connect(self._server.address)
        chunk_bytes = min(MAX_CHUNK_BYTES, options.size_bytes // CHUNKS)
        where: dict[str, Any] = {"server": self._server.address, "model": MODEL, "transports": "tcp"}
        for child in self._all():
            is_trainer = child is self._trainer
            child.do("open", replica=child.name, reliable=is_trainer, chunk_bytes=chunk_bytes, **where)

    def _all(self) -> list[Child]:
        return [self._trainer, *self._rollouts.values()]

    def round(self, *, is_killing: bool = False) -> Round:
        """Publish a version, and have it fetched."""
        published_at, stall_s = self._publish()
        told: dict[str, Any] = {"spec": self._version, "every_s": SAMPLE_S, "timeout": CALL_S}
        asked = {name: child.ask("follow", **told) for name, child in self._rollouts.items()}
        if is_killing:
            self._kill_a_source(published_at)
        found = {name: each.result() for name, each in asked.items() if name in self._rollouts}
        right, *digests = _ask_all(self._all(), "digest")
        sent_before, self._sent_bytes = self._sent_bytes, self._trainer.do("look")["statistics"]["sent_bytes"]
        fetches = [
            _fetch(name, each, published_at, is_right=digest == right)
            for (name, each), digest in zip(found.items(), digests, strict=True)
        ]
        usages = _ask_all(self._all(), "usage")
        self._peaks |= {child.name: used["peak_bytes"] for child, used in zip(self._all(), usages, strict=True)}
        return Round(self._version, stall_s, self._sent_bytes - sent_before, fetches, sum(self._peaks.values()))

    def _publish(self) -> tuple[float, float]:
        """The next version. Returns when it was published, and for how long the trainer could not compute."""
        stall_s = self._trainer.do("call", verb="unpublish", timeout=CALL_S)["seconds"] if self._version else 0.0
        self._trainer.do("step")
        self._version += 1
        published = self._trainer.do("call", verb="publish", version=self._version, timeout=CALL_S)
        return published["ended"], stall_s + published["seconds"]

    def _kill_a_source(self, published_at: float) -> None:
        """Kill a rollout that others read from: stop it first, and go on if none waits for it."""
        patience_s = 1 + self._size_bytes / (200 * MIB)
        asked = [child.ask("await_progress", share=KILL_AT, within_s=patience_s) for child in self._rollouts.values()]
        for each in asked:
            with suppress(Failed):  # all of it had come before it was seen to come
                source = self._rollouts.get(each.result())
                if source is not None and self._has_killed(source, published_at):
                    return

    def _has_killed(self, source: Child, published_at: float) -> bool:
        source.signal(signal.SIGSTOP)
        at_s = time.monotonic() - published_at
        targets = [each.target for each in self._view.transfers() if each.source == source.name and not each.is_void]
        shares = {name: self._rollouts[name].do("look")["share"] for name in targets}
        readers = {name: share for name, share in shares.items() if share is not None}
        if not readers:
            source.signal(signal.SIGCONT)
            return False
        source.kill()
        del self._rollouts[source.name]
        self.lost = source.name, at_s, readers
        return True


def _ask_all(children: list[Child], do: str) -> list[Any]:
    return [each.result() for each in [child.ask(do) for child in children]]


def _fetch(rollout: str, found: dict[str, Any], published_at: float, *, is_right: bool) -> Fetch:
    curve = [(when - published_at, source, size_bytes) for when, source, size_bytes in found["samples"]]
    by_source = {source: size_bytes for _, source, size_bytes in curve}
    return Fetch(rollout, found["began"] - published_at, found["ended"] - published_at, by_source, curve, is_right)
