"""A model of Llama's kind between processes that cut it differently: every element compared with plain indexing.

GQA with fewer KV heads than ranks, fused qkv and gate_up, transposed o_proj, a padded vocabulary, tied embeddings,
stacked experts; trainers cut rows unevenly, in three and in two.
"""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import tensorhub
from forked import Forked, module

from .process import eventually

pytestmark = pytest.mark.processes

LEASE_S = 8  # on two busy cores, twelve processes stand still for seconds now and then


class Cut:
    """The processes of one replica."""

    def __init__(self, address: str, name: str, kind: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks
        self.processes = [
            Forked(module("processes.cut_worker"), [address, name, kind, rank, ranks]) for rank in range(ranks)
        ]
        self._pool = ThreadPoolExecutor(ranks)

    def ready(self) -> "Cut":
        for rank in range(self.ranks):
            assert self._answer(rank), f"{self.name}[{rank}] has not begun"
        return self

    def tell(self, **command: object) -> list:
        """All ranks at once; what each answers."""
        return list(self._pool.map(lambda rank: self.tell_one(rank, **command), range(self.ranks)))

    def tell_one(self, rank: int, **command: object):
        """One of them."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        answer = self._answer(rank)
        return answer.get("value", answer)

    def _answer(self, rank: int) -> dict:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return json.loads(stdout.readline() or "{}")

    def kill(self) -> None:
        """As `kill -9`."""
        for process in self.processes:
            process.close()
        self._pool.shutdown()


@contextlib.contextmanager
def cluster() -> Iterator:
    """`start(name, kind, ranks)` starts a replica, which is killed in the end."""
    made: list[Cut] = []
    with tensorhub.serve(lease_s=LEASE_S, report_s=0.2) as server:

        def start(name: str, kind: str, ranks: int) -> Cut:
            made.append(Cut(server.address, name, kind, ranks))
            return made[-1]

        start.address = server.address
        try:
            yield start
        finally:
            for cut in made:
                if cut.processes[0].poll() is None:
                    cut.kill()


def judge(found: list, version: int, *, sources: set[str] | None = None) -> None:
    """That is what each rank got, from these replicas only."""
    for one in found:
        assert one.get("version") == version, one
        assert one["wrong"] == []
        assert one["is_outside_kept"]
        assert one["said"] == {"step": version}
        if sources is not None:
            assert {name for name, size in one["bytes"].items() if size} <= sources


def fill_all(*cuts: Cut, verb: str = "replicate") -> list[list]:
    """All of them at once."""
    with ThreadPoolExecutor(len(cuts)) as pool:
        return list(pool.map(lambda cut: cut.tell(do="fill", verb=verb), cuts))


def test_from_a_trainer_to_engines_to_a_trainer_and_back_when_it_has_died(figures):
    with cluster() as start:
        trainer = start("trainer", "trainer", 3)
        engines = [start(f"tp{ranks}", "engine", ranks) for ranks in (1, 2, 4)]
        second = start("tp2-second", "engine", 2)
        for cut in (trainer, *engines, second):
            cut.ready()
        size = sum(trainer.tell(do="size"))
        assert trainer.tell(do="publish", version=1) == [1, 1, 1]
        for found in fill_all(*engines):
            judge(found, 1)
        judge(second.tell(do="fill"), 1, sources={"tp2"})  # of its own layout: nothing from anybody else
        sent = sum(trainer.tell(do="sent"))
        figures(f"trainer sent {sent / size:.2f} of its bytes for three layouts", sent=sent, size=size)
        assert sent <= 1.1 * 3 * size  # replicated KV heads, norms and tied tensors count once for each rank
        assert trainer.tell(do="publish", version=2) == [2, 2, 2]
        for found in fill_all(*engines, second, verb="update"):
            judge(found, 2)
        assert trainer.tell(do="check") == [None] * 3
        trainer.kill()
        smaller = start("trainer-of-two", "trainer", 2).ready()
        judge(smaller.tell(do="fill"), 2)
        again = start("trainer", "trainer", 3).ready()
        judge(again.tell(do="fill"), 2)
        assert smaller.tell(do="check") == [None] * 2
        assert again.tell(do="publish", version=3) == [3, 3, 3]
        for found in fill_all(*engines, second, smaller, verb="update"):
            judge(found, 3)


def test_the_trainer_is_killed_while_replicas_of_two_layouts_read():
    """Whatever it had sent by then: the others who have the version bring the rest, and nothing wrong is taken."""
    with cluster() as start:
        trainer, engine = start("trainer", "trainer", 3), start("tp2", "engine", 2)
        readers = [start("rows", "trainer", 2), start("tp4", "engine", 4)]
        for cut in (trainer, engine, *readers):
            cut.ready()
        assert trainer.tell(do="publish", version=1) == [1, 1, 1]
        judge(engine.tell(do="fill"), 1)
        view = tensorhub.connect(start.address)
        with ThreadPoolExecutor(2) as pool:
            filling = [pool.submit(cut.tell, do="fill") for cut in readers]
            eventually(lambda: view.transfers() or any(found.done() for found in filling), "somebody reads")
            trainer.kill()
            for found in filling:
                judge(found.result(), 1)


def test_a_source_that_lies_about_a_tile_is_not_believed_and_the_others_bring_it():
    with cluster() as start:
        trainer, engine = start("trainer", "trainer", 3), start("tp2", "engine", 2)
        reader = start("tp1", "engine", 1)
        for cut in (trainer, engine, reader):
            cut.ready()
        assert trainer.tell(do="publish", version=1) == [1, 1, 1]
        judge(engine.tell(do="fill"), 1)
        for rank in range(3):
            trainer.tell_one(rank, do="spoil")  # its memory is not what it has published
        judge(reader.tell(do="fill"), 1)
        assert all(answer["kind"] == "NotDrained" for answer in trainer.tell(do="check"))
