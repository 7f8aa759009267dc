"""A reference server, and workers that say whatever a test has them say."""

from typing import TypeVar

from msgspec.structs import replace

from tensorhub.protocol.messages import Hello, LayoutInfo, Orders
from tensorhub.protocol.names import Number, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server

from .kit import LAYOUT, hello, report

E = TypeVar("E")
MAX_CALLS = 20  # in a second


class Town:
    """A server and workers that report what the test says."""

    def __init__(self, *, default_retain: int = 1, **settings: object) -> None:
        chosen = Settings(default_retain=default_retain, **settings)  # type: ignore[arg-type]
        self.server = Server(chosen, 0.0, 1, fresh=True)
        self.now = 0.0
        self.hellos: dict[WorkerId, Hello] = {}
        self.numbers: dict[WorkerId, int] = {}
        self.orders: dict[WorkerId, Orders] = {}
        self.told: dict[WorkerId, dict] = {}

    def joins(
        self,
        who: WorkerId,
        *,
        shards: int = 1,
        site: str = "",
        host: str = "",
        place: str = "",
        reliable: bool = True,
        may_be_elected: bool = False,
        retain: int = 0,
        **more: object,
    ) -> None:
        prefetch = "seed" if may_be_elected else "never"
        said = hello(who, shards=shards, site=site, host=host)
        self.hellos[who] = replace(said, place=place, reliable=reliable, prefetch=prefetch, retain=retain)
        for message in (self.hellos[who], LayoutInfo.of(LAYOUT)):
            self._hear(self.server.handle(message, sender=str(who), now=self.now))
        self.says(who, **more)

    def loses_its_line(self, who: WorkerId) -> None:
        self._hear(self.server.disconnected(str(who), now=self.now))

    def says_hello_again(self, who: WorkerId) -> None:
        self._hear(self.server.handle(self.hellos[who], sender=str(who), now=self.now))

    def says(self, who: WorkerId, **more: object) -> None:
        self.numbers[who], self.told[who] = self.numbers.get(who, 0) + 1, more
        heard = self.orders.get(who)
        known = {"session": heard.session if heard is not None else Number(0)}
        more = {**known, "layout": LAYOUT.digest(), "size_bytes": LAYOUT.size_bytes, **more}
        told = report(self.numbers[who], **more)
        self._hear(self.server.handle(told, sender=str(who), now=self.now))

    def events(self, kind: type[E]) -> list[E]:
        """The events of that kind so far."""
        return [each for each in self.server.state.events if isinstance(each, kind)]

    def until(self, now: float) -> None:
        for _ in range(MAX_CALLS):
            if self.server.next_deadline() > now:
                break
            self.now = max(self.now, self.server.next_deadline())
            self._hear(self.server.tick(now=self.now))
        else:
            raise AssertionError(f"{self.server.next_deadline()} again and again")
        self.now = now

    def _hear(self, said: list) -> None:
        for sender, message in said:
            assert isinstance(message, Orders)
            self.orders.update({who: message for who in self.numbers if str(who) == sender})
        self.server.check_invariants()
