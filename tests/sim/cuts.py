"""Who cannot reach whom, who is slow, who stands still: the misfortunes that last, while they last."""

from typing import TYPE_CHECKING

from .plan import Misfortune
from .world import World

if TYPE_CHECKING:
    from .process import Process

BEAT_S = 1.0  # who stutters sends nothing for a share of each such time


class Cuts:
    """The misfortunes in force."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.in_force: dict[int, Misfortune] = {}
        self._count = 0

    def add(self, misfortune: Misfortune) -> int:
        self._count += 1
        self.in_force[self._count] = misfortune
        return self._count

    def remove(self, number: int) -> None:
        self.in_force.pop(number, None)

    def calm(self) -> None:
        """Only what stays to the end goes on."""
        self.in_force = {number: each for number, each in self.in_force.items() if each.stays}

    def _any(self, kinds: tuple[str, ...], process: "Process") -> Misfortune | None:
        for each in self.in_force.values():
            if each.kind in kinds and is_target(each.target, process):
                return each
        return None

    def is_mute(self, process: "Process") -> bool:
        return self._any(("mute", "cut"), process) is not None

    def is_deaf(self, process: "Process") -> bool:
        return self._any(("deaf", "cut"), process) is not None

    def is_paused(self, process: "Process") -> bool:
        return self._any(("pause",), process) is not None

    def has_line(self, process: "Process") -> bool:
        """It can have a connection to the server."""
        return self._any(("disconnect",), process) is None

    def is_gone(self, *names: str) -> bool:
        """Nobody may be started there any more: a worker, by its own name and those of its host and site."""
        return any(each.kind == "gone" and each.target in names for each in self.in_force.values())

    def is_unplugged(self, one: "Process", other: "Process") -> bool:
        """No byte gets from one to the other."""
        for each in self.in_force.values():
            if each.kind != "unplug":
                continue
            for here, there in ((one, other), (other, one)):
                is_inside = is_target(each.target, here) and is_target(each.target, there)
                if is_target(each.target, here) and (is_target(each.other, there) if each.other else not is_inside):
                    return True
        return False

    def slowness(self, source: "Process") -> float:
        """How many times longer a chunk from there takes."""
        found = self._any(("slow",), source)
        return found.value if found is not None else 1.0

    def is_silent(self, source: "Process") -> bool:
        """It sends nothing just now, though it lives."""
        found = self._any(("stutter",), source)
        return found is not None and self.world.now % BEAT_S < found.value * BEAT_S


def is_target(target: str, process: "Process") -> bool:
    """The misfortune hits that process: by name, by host, by site."""
    return target in (str(process.me), process.hello.host, process.hello.site)
