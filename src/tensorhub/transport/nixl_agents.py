"""The NIXL agents of one transport: one that reads and lets read, and further ones for what it cannot introduce.

Peers must not be told of two memories in one place by one agent (`nixl_agent`, 6). Then a further one tells them of the
second, and ends when nothing that it has told of is there any more. The first goes on, for to register a model anew may
take longer than to read it.

It must never: end an agent by which somebody may still read, or leave one behind when the transport closes.
"""

import atexit
import os
import threading
from functools import partial
from typing import Any
from weakref import WeakSet

from .base import ByteStream
from .nixl_agent import Agent, Broken
from .nixl_memory import Page, places_of

_living: "WeakSet[Agents]" = WeakSet()


class Agents:
    """All of them. Thread-safe."""

    def __init__(self, bindings: Any, *, workers: int, tls: str = "", emulates: bool = False) -> None:
        """As `Agent`. Raises `TransportMissing`."""
        self.seals = Page()
        self.scratch = Page()  # where readers put the seals that they look at
        self._make = partial(Agent, bindings, self.seals, self.scratch, workers=workers, tls=tls, emulates=emulates)
        self._lock = threading.Lock()
        self._agent: Agent | None = self._make()
        self._further: list[Agent] = []
        self.replaced = 0  # agents that had to end
        _living.add(self)

    def current(self) -> Agent:
        """To read by. Raises `TransportMissing` if a new one cannot be had, `Broken` once closed."""
        with self._lock:
            return self._current()

    def introducing(self, stream: ByteStream) -> Agent:
        """To tell peers of this stream's memory by. Raises the same."""
        with self._lock:
            self._end_needless()
            agents = [self._current(), *self._further]
            for agent in agents:
                if agent.tells_of(stream):
                    return agent
            places = places_of(stream) or ()
            for agent in agents:
                if agent.take_on(stream, places):
                    return agent
            made = self._make()
            made.take_on(stream, places)
            self._further.append(made)
            return made

    def _current(self) -> Agent:
        if self._agent is None:
            raise Broken("this nixl transport was closed")
        if self._agent.ended is not None:
            self._agent = self._make()
            self.replaced += 1
        return self._agent

    def _end_needless(self) -> None:
        for agent in self._further:
            if not agent.is_needed:
                agent.end("nothing is there any more that it has told of")
        self._further = [agent for agent in self._further if agent.ended is None]

    def close(self) -> None:
        with self._lock:
            agents, self._agent, self._further = [self._agent, *self._further], None, []
        for agent in agents:
            if agent is not None:
                agent.end("its worker closed")

    def forget(self) -> None:
        """In a forked child."""
        for agent in (self._agent, *self._further):
            if agent is not None:
                agent.forget("this process is a fork of the one that opened it")
        self._agent, self._further = None, []


def _end_all() -> None:
    for agents in list(_living):
        agents.close()


def _forget_all() -> None:
    for agents in list(_living):
        agents.forget()
    _living.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
