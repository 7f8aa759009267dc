"""Long polls: a question that is asked anew whenever something may have changed, until its answer is final.

All who ask the same get the same answer, worked out once for a burst of reports. Where that takes long it is done more
seldom: `SHARE` of the time goes into all questions together. It must never: keep the loop from everybody's orders.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

NEWS_S = 0.02  # a burst of reports wakes the long polls once
SHARE = 0.05  # of one core, for all questions that wait
MOST_REST_S = 1.0  # however much others have asked just now


@dataclass
class _Asked(Generic[T]):
    """A question that somebody waits for."""

    waiting: int = 0  # so many
    answer: T | None = None
    burst: int = -1  # that the answer has seen
    fresh_until: float = 0.0  # not asked again before


class Polls:
    """Who waits for an answer of the reference server."""

    def __init__(self) -> None:
        self.is_over = False  # nobody is kept waiting any more
        self._asked: dict[Hashable, _Asked[object]] = {}
        self._has_changed = asyncio.Event()
        self._news = asyncio.Event()
        self._burst = 0
        self._rests_until = 0.0  # what all questions have cost so far is a share of the time by then

    def note(self) -> None:
        """Something may have changed."""
        if self._asked:
            self._burst += 1
            self._has_changed.set()

    def end(self) -> None:
        """Answer everybody as things are."""
        self.is_over = True
        self._news.set()

    async def run(self) -> None:
        """Wake those who wait, once for each burst of reports."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            self._news.set()
            self._news.clear()
            await asyncio.sleep(NEWS_S)

    async def ask(self, key: Hashable, look: Callable[[], T], is_final: Callable[[T], bool], patience_s: float) -> T:
        """The answer once it is final, or as it is when the patience ends. Equal keys are equal questions."""
        asked: _Asked[object] = self._asked.setdefault(key, _Asked())
        asked.waiting += 1
        try:
            answer = self._look(asked, look)
            try:
                async with asyncio.timeout(patience_s):
                    while not is_final(answer) and not self.is_over:
                        await self._news.wait()
                        await asyncio.sleep(max(0.0, asked.fresh_until - time.monotonic()))
                        answer = self._look(asked, look)
            except TimeoutError:
                return self._look(asked, look)
            return answer
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                del self._asked[key]

    def _look(self, asked: _Asked[object], look: Callable[[], T]) -> T:
        began = time.monotonic()
        if asked.burst != self._burst or asked.answer is None:
            asked.answer, asked.burst = look(), self._burst
            now = time.monotonic()
            rests_until = max(self._rests_until, began) + (now - began) / SHARE
            self._rests_until = min(rests_until, now + MOST_REST_S)
            asked.fresh_until = self._rests_until
        answer: T = asked.answer  # type: ignore[assignment]
        return answer
