"""Every error that TensorHub raises, as one tree. The class says whose fault it is and whether a retry can help.

    TensorHubError                   .code (what travels on the wire)   .retryable   .hint
    ├── UsageError                   the caller broke the contract: fix the code, never retry
    │   ├── NotDrained                   buffer changed or freed while others may read it
    │   ├── LayoutMismatch               a tensor differs in name, dtype, shape or order: says which and how
    │   ├── VersionConflict              same number with other content, or going backwards
    │   ├── GroupMismatch                shards of one replica disagree on what they are doing
    │   ├── ShardTaken                   another live worker already is this shard of this replica
    │   └── Closed                       this Weights was closed, or belongs to the process forked from
    ├── Unavailable                  true for now: retry later, or choose another version
    │   ├── VersionUnavailable           no live worker holds it (names its last holder)
    │   ├── GroupIncomplete              a member of the group is missing or died
    │   ├── HostMemoryFull               no room: for a version that must be kept, a buffer to cast into, or the work
    │   ├── ServerUnreachable            it cannot be opened or asked without one; work in hand goes on
    │   └── DeadlineExceeded             names what was missing at the end, and how far it got
    ├── Refused                      token or protocol version not accepted
    ├── SessionLost                  declared dead; rejoin; nothing granted before counts
    ├── TransferError                data plane
    │   ├── SourceLost                   handled inside by another source; seen only when none is left
    │   └── CorruptTransfer              digest differs; the buffer is poisoned and never published
    └── TransportMissing             library or device absent: names the extra to install
    InvariantViolation(AssertionError)   our bug: stop this process, keep the journal

Errors are told apart by class, or on the wire by `code`; never by their text.
"""


def printable(text: str) -> str:
    """The text as one line that no terminal obeys: ESC becomes `\\x1b`, a line's end `\\n`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shortened(text: str, most: int) -> str:
    """The text in printable characters, or its beginning and an ellipsis: words of others may be of any length."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


HIGHER = "publish a higher number, as next_version() names"  # what to do after a VersionConflict
SPOILED = "poisoned: its last fill failed half-way"  # it may not be published, nor a step be begun on it
SPOILED_HINT = "replicate a version, or register() again once good content is in the tensors"


class TensorHubError(Exception):
    """Root of the tree. `code` travels on the wire; `hint` says what to do next and is shown as a note."""

    code = "error"
    retryable = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class UsageError(TensorHubError):
    """The caller broke the contract. Fix the code, a retry cannot help."""

    code = "usage"


class NotDrained(UsageError):
    """The buffer was changed, or is about to be, while others may still read it."""

    code = "not-drained"


class LayoutMismatch(UsageError):
    """Two workers of one shard differ in a tensor's name, dtype, shape or order; the message names the tensor."""

    code = "layout-mismatch"


class VersionConflict(UsageError):
    """A number is taken, lower than the newest or too far above it, or another replica is the writer of the model."""

    code = "version-conflict"


class GroupMismatch(UsageError):
    """The shards of one replica made different calls after the same one, or begin a step with different versions."""

    code = "group-mismatch"


class ShardTaken(UsageError):
    """Another live worker already is this shard of this replica."""

    code = "shard-taken"


class Closed(UsageError):
    """This object was closed, or was opened by the process that this one was forked from."""

    code = "closed"


class Unavailable(TensorHubError):
    """True for now, not a fault of the caller: retry later, or choose another version."""

    code = "unavailable"
    retryable = True


class VersionUnavailable(Unavailable):
    """No live worker holds the version; the message names its last holder, where that is known."""

    code = "version-unavailable"


class GroupIncomplete(Unavailable):
    """A member of the replica's group is missing, died or gave up, so the call failed for all of its shards."""

    code = "group-incomplete"


class HostMemoryFull(Unavailable):
    """No room for a host copy that must be kept, for the buffer into which masters are cast, or for the work itself."""

    code = "host-memory-full"


class ServerUnreachable(Unavailable):
    """The reference server does not answer what is asked of it now: to open, to pin, to show how things are."""

    code = "server-unreachable"


class DeadlineExceeded(Unavailable):
    """The call's timeout ended; the message names what was missing at the end (the server too) and how far it got."""

    code = "deadline-exceeded"


class Refused(TensorHubError):
    """The other side does not accept the token or the protocol version."""

    code = "refused"


class SessionLost(TensorHubError):
    """The server declared this worker dead. It rejoins by itself; nothing granted before counts."""

    code = "session-lost"
    retryable = True


class TransferError(TensorHubError):
    """A transfer of bytes between workers failed."""

    code = "transfer"
    retryable = True


class SourceLost(TransferError):
    """The source vanished or fell silent. Another one is tried first; this is raised only when none is left."""

    code = "source-lost"


class CorruptTransfer(TransferError):
    """Bytes differ from the digest that their publisher announced. They were not accepted."""

    code = "corrupt-transfer"


class TransportMissing(TensorHubError):
    """A library or device that the transport needs is absent; the message names the extra to install."""

    code = "transport-missing"


class InvariantViolation(AssertionError):
    """TensorHub itself is wrong. Not a `TensorHubError`: do not catch it and go on."""


def _tree(root: type[TensorHubError]) -> dict[str, type[TensorHubError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[TensorHubError]] = _tree(TensorHubError)


def error_from_code(code: str, message: str, *, hint: str | None = None) -> TensorHubError:
    """The error that `code` stands for; an unknown code (a newer peer) becomes the root class."""
    return BY_CODE.get(code, TensorHubError)(message, hint=hint)
