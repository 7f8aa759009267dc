"""Events and effects of a read across: one read out of several sources that are cut in another way (see `events`).

A *part* is what comes from one of the sources. It has a ticket and a fate of its own; the read as a whole writes the
memory as any other read does.
"""

from dataclasses import dataclass

from ..messages import Failure, Grant
from ..names import Digest, Ticket

# --- events: the shell tells ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcrossOpened:
    """After `OpenAcross`: the manifests of all sources are those of the granted content, the registered tensors can be
    filled from them, and this is the root of what they will be. Nothing was written. `ticket` is the read's."""

    ticket: Ticket
    root: Digest


@dataclass(frozen=True, slots=True)
class PartEnded:
    """No byte of this part can land any more, and its source need not serve it. Said once for each part that has not
    ended with the whole read. `brought`: all that was wanted of it is in place. `failure` is None if so, or if the part
    was stopped because we asked; then another part may bring what it has not."""

    ticket: Ticket  # the read's
    part: Ticket
    brought: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class PartMeasured:
    """How many bytes have come by this part so far."""

    ticket: Ticket  # the read's
    part: Ticket
    arrived_bytes: int


# --- effects: the machine wants -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenAcross:
    """Fetch the manifest of each grant's content from its source and compare its root with the grant's, derive the
    manifest of the registered layout, and judge whether all of that is covered. Write nothing. Answer with
    `AcrossOpened`; with `ReadEnded` and why not, where no other source could help (a `LayoutMismatch` names tensor and
    part); with `PartEnded` for a source that fails, and go on once `AddPart` has named another.

    The read is known by `ticket`, the lowest of these grants': `ReadTouched`, `ReadAdvanced` (by chunks of the
    registered layout), `ReadBarred` and `ReadEnded` name that one. `ReadEnded` tells once of all parts together."""

    ticket: Ticket
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class StartAcross:
    """Read what is missing out of these sources, into the registered memory or into a host copy (`to_host` of each
    grant); answer as after `StartRead`, and with `PartEnded` for each part that ends before all is in place. Serve what
    has been verified under the root that `AcrossOpened` said. It has been opened before. While something is missing
    that no part brings, wait for `AddPart`; end the read only when all is there, when it is stopped, or when no other
    source could help."""

    ticket: Ticket
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class AddPart:
    """One more source for that read: what is missing and no part brings is planned anew, over this one too. If it is
    not needed, say so with `PartEnded` (`brought`)."""

    ticket: Ticket
    grant: Grant


@dataclass(frozen=True, slots=True)
class StopPart:
    """Let this part of that read begin nothing more; end it soon, and answer with `PartEnded`. It may just have ended
    by itself: then there is no further answer."""

    ticket: Ticket
    part: Ticket
