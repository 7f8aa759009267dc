"""The registered memory of a worker: what its buffer may become, and what of it peers may read.

`TRANSITIONS` is all that can happen to a buffer. Each trigger is a method of `RegisteredMemory`. A transition that is
not in the table is an `InvariantViolation`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from ..protocol.errors import InvariantViolation
from ..protocol.messages import Buffer, Empty, Filling, Holding, Poisoned, Vacated, Withdrawing
from ..protocol.names import Digest, Number, Version, WorkerId
from .events import StartServing, StopServing

Kind = TypeVar("Kind", Filling, Holding, Withdrawing, Vacated)


class Transition(NamedTuple):
    """One thing that can happen to a buffer."""

    trigger: str  # a method of `RegisteredMemory`
    before: type[Buffer]
    after: type[Buffer]
    why: str


TRANSITIONS = (
    Transition("register", Empty, Empty, "the caller registers tensors"),
    Transition("register", Poisoned, Empty, "the caller registers tensors"),
    Transition("publish", Empty, Holding, "the server accepted the version"),
    Transition("publish_again", Holding, Holding, "the server accepted what is held as a publish of its own"),
    Transition("publish_again", Withdrawing, Withdrawing, "the same of what was published without it"),
    Transition("note_published", Holding, Holding, "the publish has ended well on all shards"),
    Transition("note_published", Withdrawing, Withdrawing, "the same of what was published without the server"),
    Transition("begin_fill", Empty, Filling, "a call was resolved to a version, and no worker reads or writes here"),
    Transition("begin_fill", Poisoned, Filling, "the same; what is here is no version"),
    Transition("begin_fill", Vacated, Filling, "the new version is copied in from host memory"),
    Transition("touch", Vacated, Filling, "the first byte of the new version may be written: the old one is gone"),
    Transition("advance", Filling, Filling, "more chunks are in place and verified"),
    Transition("complete", Filling, Holding, "the last chunk is in place and verified"),
    Transition("cut_short", Filling, Poisoned, "the call ended before the fill did, or a host copy will fill it anew"),
    Transition("withdraw", Holding, Withdrawing, "unpublish or close; or another version is wanted"),
    Transition("hurry", Withdrawing, Withdrawing, "the readers' share of the caller's time is over: cut them off"),
    Transition("keep", Withdrawing, Holding, "the call failed, or wants what is not within reach"),
    Transition("serving_stopped", Withdrawing, Vacated, "drained: no peer reads it, and all of it is still here"),
    Transition("serving_stopped", Withdrawing, Empty, "drained, and the worker leaves"),
    Transition("serving_stopped", Poisoned, Poisoned, "no peer reads the good chunks any more: a fill may begin"),
    Transition("serving_stopped", Poisoned, Empty, "the same of what was disowned: its publisher may change it"),
    Transition("take_back", Vacated, Holding, "nothing was written over it"),
    Transition("let_go", Vacated, Empty, "an unpublish has ended well"),
    Transition("disown", Holding, Poisoned, "the server knows other content as this version, and peers may read here"),
    Transition("disown", Withdrawing, Poisoned, "the same, while its readers are waited for"),
    Transition("disown", Vacated, Poisoned, "the same; no peer reads here, and it came from a peer"),
    Transition("disown", Vacated, Empty, "the same; no peer reads here, and its publisher may change it"),
)

_ALLOWED = frozenset((each.trigger, each.before, each.after) for each in TRANSITIONS)


def _content(buffer: Holding | Withdrawing | Vacated) -> tuple[Version, Digest, bool, Number, bool]:
    return buffer.version, buffer.root, buffer.published, buffer.epoch, buffer.is_pending


@dataclass
class RegisteredMemory:
    """The tensors that the caller registered."""

    me: WorkerId
    buffer: Buffer = field(default_factory=Empty)
    serving: Version | None = None  # peers may read what is here of this version
    is_stopping: bool = False  # the shell was asked to end that
    is_disowned: bool = False  # what is being stopped was published here, and is not what its version is
    withdrawn_in: int = 0  # the first report that says that no peer may begin to read here
    drained_by: int = 0  # the report that the latest orders answer, if they say that no peer reads here, and none will

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Version | None:
        """The version whose bytes are here, whole and verified."""
        return self.buffer.version if isinstance(self.buffer, Holding | Withdrawing | Vacated) else None

    @property
    def is_drained(self) -> bool:
        """No peer reads here, and none can begin to: the server has said so of this withdrawal."""
        return 0 < self.withdrawn_in <= self.drained_by

    # --- what may happen, in the order of the table -------------------------------------------------------------------

    def register(self) -> None:
        """The caller has registered (other) tensors."""
        self._become("register", Empty())

    def publish(self, version: Version, root: Digest, epoch: Number) -> StartServing:
        """The caller's tensors are this version, if the publish ends well."""
        self._become("publish", Holding(version, root, published=True, epoch=epoch, is_pending=True))
        return self._serve(version, root)

    def publish_again(self, epoch: Number) -> None:
        """What is held is published once more: a publish before has failed, or it is held without a change."""
        old = self.buffer
        if not isinstance(old, Holding | Withdrawing):
            raise InvariantViolation(f"{self.me}: publish_again of a buffer that is {old}")
        self._become("publish_again", replace(old, published=True, epoch=epoch, is_pending=True))

    def note_published(self) -> None:
        """The publish has ended well: what is held is a version."""
        if isinstance(self.buffer, Holding | Withdrawing) and self.buffer.is_pending:
            self._become("note_published", replace(self.buffer, is_pending=False))

    def begin_fill(self, version: Version) -> None:
        """This version comes next, from peers or from a host copy."""
        self._become("begin_fill", Filling(version))

    def touch(self, version: Version) -> None:
        """The first byte of a read may be written over what was vacated."""
        self._become("touch", Filling(version))
        self.serve_fill()

    def serve_fill(self) -> None:
        """A read fills the buffer: its chunks are served as they come."""
        self.serving = self._it("serve_fill", Filling).version

    def advance(self, done: int, chunks: int) -> None:
        """Notes how many chunks are in place."""
        old = self._it("advance", Filling)
        self._become("advance", Filling(old.version, max(old.done, done), chunks))

    def complete(self, root: Digest, epoch: Number) -> StartServing | None:
        """All of the version is here. What a read brought was served all along, and a host copy is from now on."""
        version = self._it("complete", Filling).version
        self._become("complete", Holding(version, root, epoch=epoch))
        return self._serve(version, root) if self.serving is None else None

    def cut_short(self, *, next_report: int) -> None:
        """What was filled is no version. Peers that read its good chunks must leave before the next fill."""
        self._poison("cut_short", next_report)

    def withdraw(self, *, next_report: int) -> None:
        """Ask to take the promise back."""
        self._become("withdraw", Withdrawing(*_content(self._it("withdraw", Holding))))
        self.withdrawn_in = next_report

    def hurry(self) -> None:
        """Wait no longer for readers."""
        self._become("hurry", replace(self._it("hurry", Withdrawing), impatient=True))

    def keep(self) -> None:
        """Promise it again, as if nothing had been asked."""
        self._become("keep", Holding(*_content(self._it("keep", Withdrawing))))
        self.withdrawn_in = 0

    def stop_serving(self) -> StopServing | None:
        """No peer may read here any more. `serving_stopped` comes once that is so."""
        if self.serving is None or self.is_stopping:
            return None
        self.is_stopping = True
        return StopServing(self.serving)

    def serving_stopped(self, version: Version, *, is_leaving: bool) -> None:
        """No peer reads here any more, and none can."""
        if not self.is_stopping or self.serving != version:
            raise InvariantViolation(f"{self.me}: serving {version} stopped, but it serves {self.serving}")
        self.serving, self.is_stopping, self.withdrawn_in = None, False, 0
        match self.buffer:
            case Poisoned():
                self._become("serving_stopped", Empty() if self.is_disowned else Poisoned())
                self.is_disowned = False
            case Withdrawing() as old if not is_leaving:
                self._become("serving_stopped", Vacated(*_content(old)))
            case _:
                self._become("serving_stopped", Empty())

    def take_back(self) -> StartServing:
        """Hold what was vacated again."""
        old = self._it("take_back", Vacated)
        self._become("take_back", Holding(*_content(old)))
        return self._serve(old.version, old.root)

    def let_go(self) -> None:
        """The caller may change the tensors."""
        self._become("let_go", Empty())

    def disown(self, *, next_report: int) -> None:
        """What is here is not what its version is. If it was published here, it stays what its publisher made it."""
        is_publishers = getattr(self.buffer, "published", False)
        if self.serving is None and is_publishers:
            self._become("disown", Empty())
        else:
            self._poison("disown", next_report)
            self.is_disowned = is_publishers

    def _poison(self, trigger: str, next_report: int) -> None:
        self._become(trigger, Poisoned(self.serving))
        self.withdrawn_in = next_report if self.serving is not None else 0

    def _serve(self, version: Version, root: Digest) -> StartServing:
        self.serving = version
        return StartServing(version, root)

    def _it(self, trigger: str, kind: type[Kind]) -> Kind:
        """The buffer, which is of that kind or may not be triggered so."""
        if not isinstance(self.buffer, kind):
            raise InvariantViolation(f"{self.me}: {trigger} of a buffer that is {self.buffer}")
        return self.buffer

    def _become(self, trigger: str, after: Buffer) -> None:
        if (trigger, type(self.buffer), type(after)) not in _ALLOWED:
            raise InvariantViolation(f"{self.me}: {trigger} may not make {after} of {self.buffer}")
        self.buffer = after
