"""How the name of a source's host becomes addresses, where the resolver may take its time, or never answer.

Nothing can call a resolver back. So a thread of its own asks, which knows the name and nothing else, and whoever wants
the answer waits for it as long as a connection may take, or until its read is over. All who want the same name at once
wait for one question. An answer that comes when nobody waits any more is kept for a while: a resolver that always takes
a little longer than is waited for is of use all the same.

An address in numbers is asked of nobody. It must never: hold a read, or know one.
"""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..core.errors import Unavailable
from .tcp_addresses import Address
from .tcp_job import Job
from .tcp_wire import Vanished
from .threads import Thread, start

_KEPT_S = 15.0  # the next try comes within seconds; a resolver that asks its second server has answered by then

Found = list[tuple[Any, ...]]  # what `getaddrinfo` gives


class Question:
    """One name that is being looked up."""

    def __init__(self, address: Address) -> None:
        self.found: Found | None = None
        self.why_not = "its look-up failed"
        self.answered_at: float | None = None  # once it was
        self._address = address
        self._changed = threading.Condition()

    def ask(self) -> None:
        """In whatever thread: until there is an answer."""
        try:
            self.found = list(socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # a label that is too long, or empty, is no Unicode of a host
            self.why_not = str(error)
        finally:
            with self._changed:
                self.answered_at = time.monotonic()
                self._changed.notify_all()

    def wait(self, within_s: float, is_over: Callable[[], bool]) -> bool:
        """Until it is answered, or so long, or until that is so and `wake` is called. Whether it is answered."""
        with self._changed:
            self._changed.wait_for(lambda: self.answered_at is not None or is_over(), within_s)
            return self.answered_at is not None

    def wake(self) -> None:
        """Whoever waits looks whether it is over."""
        with self._changed:
            self._changed.notify_all()


class Asking:
    """One stream that waits for an answer, as its job knows it beside those that wait in a socket."""

    all_heard_bytes = 0

    def __init__(self, question: Question) -> None:
        self.cut = question.wake


_lock = threading.Lock()
_questions: dict[Address, Question] = {}  # under way, or answered when nobody waited any more


def look_up(job: Job, address: Address, within_s: float) -> Found:
    """What `getaddrinfo` says. Raises `Vanished` if that is nothing, or not said in time, or the read is over."""
    question = _asked(address)
    asking = Asking(question)
    job.enter(asking)
    try:
        is_answered = question.wait(within_s, lambda: job.is_over)
    finally:
        job.leave(asking)
    if not is_answered:
        why = "the read is over" if job.is_over else f"nobody has said within {within_s:g} s where {address[0]} is"
        raise Vanished(f"cannot find the host: {why}")
    with _lock:
        if _questions.get(address) is question:
            del _questions[address]
    if question.found is None:
        raise Vanished(f"cannot find the host: {question.why_not}")
    return question.found


def _is_in_numbers(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False  # it is a name, or is better looked at by who knows names
    return True


def _asked(address: Address) -> Question:
    """The question that is under way, or was answered to nobody; or a new one. Numbers are answered at once."""
    if _is_in_numbers(address[0]):
        question = Question(address)
        question.ask()
        return question
    with _lock:
        for known, question in list(_questions.items()):
            at = question.answered_at
            if at is not None and (question.found is None or at + _KEPT_S < time.monotonic()):
                del _questions[known]
        if address in _questions:
            return _questions[address]
        question = _questions[address] = Question(address)
    try:
        start(Thread(question.ask, name="tensorhub-find-host"))
    except Unavailable:
        question.ask()  # at a limit on threads this one has to
    return question


def _forget() -> None:
    """In a forked child: nobody asks there."""
    global _lock
    _lock = threading.Lock()
    _questions.clear()


os.register_at_fork(after_in_child=_forget)
