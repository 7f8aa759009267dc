"""Threads of transports: starting them, forks, shortages of this machine, and CUDA graph captures."""

import _thread
import contextlib
import ctypes
import errno
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache, wraps
from types import TracebackType
from typing import ClassVar, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from ..protocol.errors import TensorHubError, Unavailable

# --- Signals in our threads. What the process does with a signal stays its owner's.


def block_sigpipe() -> None:
    """In the calling thread, which is one of ours: a peer that leaves is an error there, and never ends the process.

    Python ignores SIGPIPE; many programs, such as command line tools, set it back to its default, which is to end.
    """
    if hasattr(signal, "pthread_sigmask") and hasattr(signal, "SIGPIPE"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})


# --- Context managers made of generators that may raise another error than the one that passes through.
#
# `contextlib.contextmanager` keeps the first error in a frame that is never left in order. From Python 3.12 on the
# error's traceback leads to that frame, and back to itself: a read and its tensors then wait for the garbage collector.


Given = TypeVar("Given")
Arguments = ParamSpec("Arguments")


class _Scope(AbstractContextManager[Given, bool | None]):
    """One block. The generator yields once."""

    def __init__(self, steps: Iterator[Given]) -> None:
        self._steps = steps

    def __enter__(self) -> Given:
        return next(self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """True if the generator has taken the error for its own."""
        if error is None:
            next(self._steps, None)
            return False
        try:
            self._steps.throw(error)  # type: ignore[attr-defined]
        except StopIteration:
            return True
        except BaseException as raised:
            is_wrapped = isinstance(error, StopIteration) and raised.__cause__ is error  # so generators raise those
            if raised is not error and not is_wrapped:
                raise
            error.__traceback__ = trace
            return False
        finally:
            del kind, error, trace
        return True


def scope(
    steps: Callable[Arguments, Iterator[Given]],
) -> Callable[Arguments, AbstractContextManager[Given, bool | None]]:
    """Make a function that returns a context manager out of a generator that yields once."""

    @wraps(steps)
    def made(*arguments: Arguments.args, **named: Arguments.kwargs) -> AbstractContextManager[Given, bool | None]:
        return _Scope(steps(*arguments, **named))

    return made


# --- Shortages: descriptors, memory and threads that this machine refuses now. A later try may have them.
#
# A shortage is an `Unavailable` wherever it arises: no transport is missing, no source is bad. A call that runs out of
# time names the last shortage.


RECENT_S = 60.0  # what was refused longer ago explains nothing
_FILES = (errno.EMFILE, errno.ENFILE)
_SCARCE = frozenset((*_FILES, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EAGAIN))
_LIBRARY_BYTES = 1 << 30  # of torch for the CPU, with what it loads
MAX_FILES = 2  # that one look-up of a name, or one import, has open at a time

FILES = "raise `ulimit -n` (LimitNOFILE of systemd), or close what is not needed; then retry"
MEMORY = "is there memory left (`ulimit -v`, or memory.max of the container's cgroup)? Retry when there is"
THREADS = "raise the limit on threads (`ulimit -u`, or pids.max of the container's cgroup), or start fewer; then retry"
REMEDIES = {os.strerror(number): FILES for number in _FILES}  # by the words of the system
REMEDIES |= {os.strerror(number): MEMORY for number in (errno.ENOMEM, errno.ENOBUFS)}

KINDS = (OSError, ImportError, MemoryError, RuntimeError)  # of which an error that is a shortage may be

_last: tuple[float, str, str] | None = None  # when, what and what helps


class NotStarted(RuntimeError):
    """The system had a thread for us, which never took its first step."""


def is_shortage(error: BaseException) -> bool:
    """The reason is something that this machine has too little of now.

    An import, a library and a name that was not found give no number: they count if no file can be opened now, or no
    library be mapped.
    """
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return error.errno in _SCARCE
    if isinstance(error, OSError | ImportError):
        return lacks_files() or _lacks_memory()
    is_thread = isinstance(error, NotStarted) or (isinstance(error, RuntimeError) and "start new thread" in str(error))
    return isinstance(error, MemoryError) or is_thread


def lacks_files() -> bool:
    """This process can open next to no file now."""
    with ExitStack() as opened:
        try:
            for _ in range(MAX_FILES):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return error.errno in _FILES
    return False


def _lacks_memory() -> bool:
    """This process can map no large library now."""
    try:
        mmap.mmap(-1, _LIBRARY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    except OSError as error:
        return error.errno == errno.ENOMEM
    return False


def note(error: BaseException, *, did: str) -> None:
    """Something failed here. It is remembered if this machine has too little of a resource."""
    global _last
    if is_shortage(error):
        text = "out of memory" if isinstance(error, MemoryError) else getattr(error, "strerror", None) or error
        _last = (time.monotonic(), f"{did}: {text}", _hint(error))


def unavailable(error: BaseException, did: str, text: str = "") -> Unavailable:
    """The error of a call that met a shortage when `did`. To be raised from the other."""
    note(error, did=did)
    is_told = (isinstance(error, OSError) and (error.errno or 0) > 0) or not isinstance(error, OSError | ImportError)
    why = f"{error}" or "out of memory"
    why = why if is_told else f"too few files, or too little memory ({why})"
    return Unavailable(text or f"this process met a limit when {did}: {why}", hint=_hint(error))


def _hint(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number in (errno.ENOMEM, errno.ENOBUFS):
        return MEMORY
    return THREADS if isinstance(error, RuntimeError) or number == errno.EAGAIN else FILES


def as_ours(error: Exception, text: str) -> TensorHubError:
    """What was not foreseen, as an error of ours with its cause: an `Unavailable` if it is a shortage."""
    said = f"{text}: {error!r}"
    ours = unavailable(error, text, said) if is_shortage(error) else TensorHubError(said)
    ours.__cause__ = error
    return ours


@scope
def named(did: str) -> Iterator[None]:
    """In this block a shortage is an `Unavailable`."""
    try:
        yield
    except KINDS as error:
        if not is_shortage(error):
            raise
        raise unavailable(error, did) from error


@scope
def tolerated(did: str) -> Iterator[None]:
    """In this block an `OSError` is passed over, except a shortage, which is an `Unavailable`."""
    try:
        yield
    except OSError as error:
        if is_shortage(error):
            raise unavailable(error, did) from error


def recent() -> tuple[str, str]:
    """The last of it, in words, and what helps, if that is not long ago; else two empty texts."""
    found = _last
    if found is None or time.monotonic() > found[0] + RECENT_S:
        return "", ""
    return f"this process met a limit {time.monotonic() - found[0]:.3g} s ago, when {found[1]}", found[2]


# --- Threads that are known to have started.
#
# `threading` waits without a limit until a new thread reports its start. A thread that dies because memory is short
# never reports it. `Thread` waits for a first step, with a limit. A thread that was given up does nothing.


START_S = 2.5  # a thread begins within 0.1 s beside ten busy ones; a shared machine stands still for seconds


class _Unawaited(threading.Event):
    """What `threading.Thread.start` waits for at last, without a limit: `Thread` waits by itself."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class Thread(threading.Thread):
    """A daemon thread. `start` returns once it runs; raises `NotStarted`, and `RuntimeError` at a limit on threads."""

    def __init__(self, target: Callable[..., object], *, name: str, args: tuple[object, ...] = ()) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = _Unawaited()
        self._first = _thread.allocate_lock()  # the thread that has it decides whether this one does anything
        self._begun = _thread.allocate_lock()
        self._begun.acquire()

    def start(self) -> None:
        super().start()
        if not self._begun.acquire(timeout=START_S) and self._first.acquire(blocking=False):
            raise NotStarted(f"{self.name} has not begun to run within {START_S:g} s")

    def run(self) -> None:
        if self._first.acquire(blocking=False):
            self._begun.release()
            super().run()


def no_thread(name: str, error: BaseException) -> Unavailable:
    """The error of a call that needed one more."""
    note(error, did=f"it started {name}")
    if isinstance(error, NotStarted | MemoryError):
        return Unavailable(f"{name} needs a thread, and that cannot be started: {error or 'no memory'}", hint=MEMORY)
    return Unavailable(f"this process may start no more threads, and {name} needs one", hint=THREADS)


def start(thread: Thread, *, otherwise: Callable[[], object] = lambda: None) -> None:
    """Start it. If the process may start none, do what is to be done then, and raise `Unavailable`."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        otherwise()
        raise no_thread(thread.name, error) from error


def is_ending(error: BaseException) -> bool:
    """The interpreter ends, and no thread begins any more: not a limit, and no later try will help."""
    return sys.is_finalizing() or "shutdown" in str(error)


# --- Forks: a child gives up every descriptor of ours at once.
#
# A connection ends for its other end when the last process that has it closes it. A trainer that forks (a DataLoader)
# and is killed would look alive through its children. In a child /dev/null takes the place of each descriptor, so that
# its number is not given out while an inherited object knows it. What is shared with the parent is closed, never shut
# down.
#
# A descriptor is made, and made known, inside `opening`, and a fork waits until no thread is inside: for `MAX_WAIT_S`
# at most, so that no fork hangs. Nothing inside `opening` may wait. Two forks do not wait: one by a library that does
# not tell Python, and one by a signal handler in the thread that is inside.


class Holder(Protocol):
    """An owner of descriptors."""

    def descriptors(self) -> Iterable[int]:
        """The file descriptors that are open now; negative numbers do not count."""
        ...


AnySocket = TypeVar("AnySocket", bound=socket.socket)

_sockets: "WeakSet[socket.socket]" = WeakSet()
_holders: "WeakSet[Holder]" = WeakSet()

MAX_WAIT_S = 1.0  # inside it takes microseconds; beside ten busy threads some 50 ms until such a thread has its turn

_opening = threading.RLock()  # a signal handler may fork in the thread that has it
_here = threading.local()  # whether the thread that forks has it for that


def opening() -> AbstractContextManager[object]:
    """No fork while a thread is inside: there a descriptor is made, and made known."""
    return _opening


def made(make: Callable[[], AnySocket]) -> AnySocket:
    """A socket that is known here from its first moment. `make` may not wait."""
    with opening():
        return tracked(make())


def tracked(sock: AnySocket) -> AnySocket:
    """A socket that no forked child keeps."""
    _sockets.add(sock)
    return sock


def track(holder: Holder) -> None:
    """Nor what this one has, as long as it lives."""
    _holders.add(holder)


def _wait_until_known() -> None:
    """Called before a fork, in the thread that forks."""
    _here.has_it = False
    _here.has_it = _opening.acquire(timeout=MAX_WAIT_S)


def _go_on() -> None:
    """Called after a fork, in the parent."""
    if _here.has_it:
        _here.has_it = False
        _opening.release()


def _let_go() -> None:
    """Called after a fork, in the child, before other code runs."""
    global _opening
    _opening = threading.RLock()  # the thread that was inside is not here
    found = [sock.fileno() for sock in list(_sockets)]
    for holder in list(_holders):
        found += holder.descriptors()
    _sockets.clear()
    _holders.clear()
    found = [descriptor for descriptor in found if descriptor >= 0]
    if not found:
        return
    with contextlib.suppress(OSError):
        os.close(found[0])  # so that there is a number left for what takes their place
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in found:
            if descriptor != null:
                os.dup2(null, descriptor, inheritable=False)
        if null not in found:
            os.close(null)


os.register_at_fork(before=_wait_until_known, after_in_parent=_go_on, after_in_child=_let_go)


# --- CUDA graphs that the user's threads capture, and what threads of this library may do on a device meanwhile.
#
# While a thread captures a graph in the usual mode, "global", the driver refuses copies, events, and registrations of
# memory to every other thread, and spoils the capture as well; but not to a thread in relaxed mode (CUDA driver API,
# cuThreadExchangeStreamCaptureMode). To wait for the whole device is refused in every mode (H200, driver 580, CUDA 13).


RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@scope
def beside_captures() -> Iterator[None]:
    """In this block the calling thread neither fails for another thread's capture nor spoils it."""
    exchange = mode_exchange()
    mode = ctypes.c_int(RELAXED)
    has_changed = exchange is not None and exchange(ctypes.byref(mode)) == 0  # `mode` is now what it was before
    try:
        yield
    finally:
        if exchange is not None and has_changed:
            exchange(ctypes.byref(mode))


@cache
def mode_exchange() -> Callable[[object], int] | None:
    """NVIDIA's function. It is too short to let the interpreter go for it. None where that driver is not."""
    try:
        found: Callable[[object], int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return found


# --- Short waits for the interpreter while a transfer begins and ends (decision 0022).
#
# A thread that wants the interpreter beside one that computes waits 5 ms by default (`sys.setswitchinterval`), after
# each call that has let go of it. A read has some twenty of these before its bytes move and after. While any thread
# asks for it the interval is `SHORT_S`, for all threads of the process. It is the usual one again while bytes move.


SHORT_S = 0.000103  # to hand over takes some 10 us; an odd number, to be known again
_ROUNDING_S = 1.5e-6  # Python keeps whole microseconds


class ShortSwitchInterval:
    """From the block's beginning to its end, but not between `restore` and `shorten`. For one thread."""

    _lock = threading.RLock()  # a signal's handler, or a finaliser, may come while its own thread has it
    _wanting: ClassVar["WeakSet[ShortSwitchInterval]"] = WeakSet()  # an interrupt may lose one: then it is not kept
    _before_s = 0.0  # what the interval was when the first came

    def shorten(self) -> None:
        """Idempotent."""
        every = ShortSwitchInterval
        with every._lock:
            if self in every._wanting:
                return
            if not every._wanting:
                if not _is_short():  # else the program kept it while it was ours, and has put it back since
                    every._before_s = sys.getswitchinterval()
                if every._before_s > SHORT_S:
                    sys.setswitchinterval(SHORT_S)
            every._wanting.add(self)

    def restore(self) -> None:
        """Idempotent."""
        every = ShortSwitchInterval
        with every._lock:
            if self in every._wanting:
                every._wanting.discard(self)
                if not every._wanting:
                    _put_back()

    def __enter__(self) -> "ShortSwitchInterval":
        self.shorten()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def _is_short() -> bool:
    return abs(sys.getswitchinterval() - SHORT_S) < _ROUNDING_S


def _put_back() -> None:
    if _is_short() and ShortSwitchInterval._before_s > SHORT_S:
        sys.setswitchinterval(ShortSwitchInterval._before_s)


def _put_back_in_child() -> None:
    """None of those threads is here, and one of them may have had the lock."""
    _put_back()
    ShortSwitchInterval._lock, ShortSwitchInterval._wanting = threading.RLock(), WeakSet()


os.register_at_fork(after_in_child=_put_back_in_child)
