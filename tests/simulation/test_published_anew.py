"""A number that a server could not know of may be published anew: then each of its contents is the version."""

import pytest

from tensorhub.protocol.names import Digest
from tests.sim.judges.memory import MemoryJudge
from tests.sim.truth.life import Held, Life
from tests.sim.world import OracleViolation

from .test_belated import FORMER, Bench

pytestmark = pytest.mark.simulation


class Anew(Bench):
    """A trainer has published a version. A second one has other content under that number."""

    def __init__(self) -> None:
        self.begins(shards=1)
        self.judge = MemoryJudge(self.truth, self.world)
        self.first, self.second, self.reader = map(self.life, ("trainer", "trainer-2", "reader"))
        self.publishes(self.first)
        self.says_that_it_exists(self.first)
        self.publishes(self.second)

    def publishes(self, life: Life) -> None:
        self.world.now += 0.1
        root = Digest(life.name)
        self.truth.contents[root] = (len(self.truth.contents),)
        life.held = Held(FORMER, root, self.world.now, published=True)
        self.truth.published(life, FORMER, root)

    def says_that_it_exists(self, content: Life, to: Life | None = None) -> None:
        """The server does, to its publisher or to another one."""
        self.world.now += 0.1
        self.truth.note_known(to or content, FORMER, content.root_of(FORMER))

    def has(self, life: Life, content: Life, where: str) -> None:
        root = content.root_of(FORMER)
        assert root is not None
        self.judge.whole(life, FORMER, root, list(self.truth.contents[root]), where)


@pytest.mark.parametrize("where", ["the copy", "what was read"])
@pytest.mark.parametrize("told", ["nobody", "by the same server", "its reader only"])
def test_nobody_takes_what_no_later_server_has_let_be_published(told: str, where: str) -> None:
    bench = Anew()
    if told == "by the same server":
        bench.says_that_it_exists(bench.second)
    elif told == "its reader only":
        bench.restarts()
        bench.says_that_it_exists(bench.second, to=bench.reader)
    life = bench.second if where == "the copy" else bench.reader
    with pytest.raises(OracleViolation, match=r"G1 immutable broken.*accepted m/trainer-2"):
        bench.has(life, bench.second, where)
    bench.has(bench.reader, bench.first, "what was read")


@pytest.mark.parametrize("where", ["the copy", "what was read"])
def test_what_a_later_server_has_let_be_published_is_taken(where: str) -> None:
    bench = Anew()
    bench.restarts()
    bench.says_that_it_exists(bench.second)
    bench.has(bench.second if where == "the copy" else bench.reader, bench.second, where)
    bench.has(bench.reader, bench.first, "what was read")
