"""Long polls: asked anew for each burst of news, once for all who ask the same, and seldom where that takes long."""

import asyncio
import time

import pytest

from tensorhub.runtime.answers import SHARE, Polls


class Question:
    """Counts how often it was asked, and is answered by `value`."""

    def __init__(self, *, takes_s: float = 0.0) -> None:
        self.asked, self.value, self._takes_s = 0, 0, takes_s

    def look(self) -> int:
        self.asked += 1
        until = time.monotonic() + self._takes_s
        while time.monotonic() < until:
            pass
        return self.value


async def polled(question: Question, polls: Polls, *, patience_s: float = 5.0, key: object = "key") -> int:
    return await polls.ask(key, question.look, lambda value: value >= 3, patience_s)


async def told(polls: Polls, question: Question, *, times: int) -> None:
    """There is news, over and over, until the question was asked so often."""
    while question.asked < times:
        polls.note()
        await asyncio.sleep(0.005)


def test_a_final_answer_comes_at_once_and_nobody_is_kept() -> None:
    question = Question()
    question.value = 3
    assert asyncio.run(polled(question, Polls())) == 3
    assert question.asked == 1


def test_a_hundred_who_ask_the_same_are_one_question() -> None:
    question = Question()

    async def ask() -> list[int]:
        polls = Polls()
        running = asyncio.ensure_future(polls.run())
        waiting = [asyncio.ensure_future(polled(question, polls)) for _ in range(100)]
        await told(polls, question, times=3)
        question.value = 3
        polls.note()
        found = await asyncio.gather(*waiting)
        running.cancel()
        return found

    assert asyncio.run(ask()) == [3] * 100
    assert question.asked <= 5


def test_who_has_no_patience_gets_the_answer_as_it_is() -> None:
    question = Question()
    assert asyncio.run(polled(question, Polls(), patience_s=0.0)) == 0
    assert asyncio.run(polled(question, Polls(), patience_s=0.05)) == 0


def test_a_question_that_takes_long_is_asked_seldom_and_its_last_answer_is_not_missed() -> None:
    question = Question(takes_s=0.01)

    async def ask() -> float:
        polls = Polls()
        running = asyncio.ensure_future(polls.run())
        waiting = asyncio.ensure_future(polled(question, polls))
        began = time.monotonic()
        await told(polls, question, times=4)
        question.value = 3
        polls.note()
        assert await waiting == 3
        running.cancel()
        return time.monotonic() - began

    took_s = asyncio.run(ask())
    assert (question.asked - 1) * 0.01 <= took_s * SHARE


def test_many_questions_together_take_no_more_time_than_one() -> None:
    question = Question(takes_s=0.004)

    async def ask() -> float:
        polls = Polls()
        running = asyncio.ensure_future(polls.run())
        waiting = [asyncio.ensure_future(polled(question, polls, key=key)) for key in range(4)]
        began = time.monotonic()
        await told(polls, question, times=12)
        question.value = 3
        polls.note()
        assert await asyncio.gather(*waiting) == [3] * 4
        running.cancel()
        return time.monotonic() - began

    took_s = asyncio.run(ask())
    assert (question.asked - 4) * 0.004 <= took_s * SHARE


@pytest.mark.parametrize("value", [0, 3])
def test_at_the_end_nobody_waits(value: int) -> None:
    question = Question()

    async def ask() -> int:
        polls = Polls()
        waiting = asyncio.ensure_future(polled(question, polls))
        await told(polls, question, times=1)
        question.value = value
        polls.note()
        polls.end()
        return await waiting

    assert asyncio.run(ask()) == value
