"""What the three programs do, and what each call must give.

The trainer publishes 1, takes it back, trains (which changes every byte), publishes 2, and perhaps leaves. A rollout
replicates the latest, then updates until it has 2. Who gets an error that tells it to retry calls again.
"""

from math import inf
from typing import TYPE_CHECKING

from tensorhub.protocol.names import Digest
from tensorhub.worker import events

from . import truth
from .actor import TRAINED, Actor, content, root_of

if TYPE_CHECKING:
    from .small import Shape, Small

TRAINER = ("publish 1", "unpublish", "publish 2")
ONCE_MORE = ("unpublish", "publish 3")
CHAPTERS = {
    "opening": "nothing was called yet",
    "reading": "the trainer has published 1, nobody has it yet",
    "turnover": "everybody has 1, which the trainer is about to take back",
    "update": "the trainer has published 2, the rollouts hold 1",
    "ahead": "the same, and they have 2 in host memory; the trainer publishes 3 next",
}
MAX_TRIES = 3  # of one call; who has failed as often as that rests


def before(shape: "Shape") -> list[str]:
    """Who has called before the chapter begins, in turn; each call has returned before the next."""
    everybody = ["trainer", *(f"rollout-{index}" for index in range(shape.rollouts))]
    calls = {"opening": [], "reading": ["trainer"], "turnover": everybody, "update": [*everybody, "trainer", "trainer"]}
    return {**calls, "ahead": calls["update"]}[shape.chapter]


def trainer_of(shape: "Shape") -> tuple[str, ...]:
    """What the trainer does."""
    return TRAINER + (ONCE_MORE if shape.chapter == "ahead" else ())


def last(shape: "Shape") -> int:
    """The version that everybody wants in the end."""
    return 3 if shape.chapter == "ahead" else 2


def may_call(small: "Small", actor: Actor) -> bool:
    """The program makes its next call now."""
    if actor.tries >= MAX_TRIES or actor.worker.state.departure is not None:
        return False
    if actor.name == "trainer":
        return actor.step < len(trainer_of(small.shape)) + small.shape.closes
    if actor.has is None:
        return True
    trainer = small.actors["trainer"]
    may_be_newer = trainer.step > 0 and (trainer.verb or trainer.step > 1 or not trainer.is_alive)
    is_last = small.published == last(small.shape)
    return bool(may_be_newer) and actor.has < last(small.shape) and (actor.step == 0 or is_last)


def call(small: "Small", actor: Actor) -> None:
    """Make the next call. Deadlines are for ever: a call that would run into one shows up as stuck."""
    if actor.name != "trainer":
        is_last = small.published == last(small.shape)  # before that there is nothing to be wrong about
        actor.floor = small.published if is_last else 0
        verb = "replicate" if actor.has is None else "update"
        actor.verb = verb
        actor.tell(small, events.Called(verb, "latest", small.now + small.shape.patience_s))
        return
    if actor.step == len(trainer_of(small.shape)):
        actor.tell(small, events.Closing(inf))
        return
    actor.verb, _, number = trainer_of(small.shape)[actor.step].partition(" ")
    if actor.verb == "publish":
        actor.memory = content(int(number))
        actor.tell(small, events.Called("publish", int(number), inf, root_of(int(number))))
    else:
        actor.tell(small, events.Called("unpublish", "", inf, Digest("")))


def cancel(small: "Small", actor: Actor) -> None:
    """The caller gives its call up."""
    actor.verb, actor.floor = "", 0
    actor.tell(small, events.Cancelled())


def finished(small: "Small", actor: Actor, effect: events.Finished) -> None:
    """The call has returned to its caller, or raised."""
    verb, actor.verb, floor, actor.floor = actor.verb, "", actor.floor, 0
    if effect.error is not None:
        truth.judge_error(small, actor, verb, effect.error)
        actor.tries += 1
        return
    actor.tries = 0
    if verb == "publish":
        truth.judge_fill(small, actor, verb, effect.version, floor)
        small.published = max(small.published, int(effect.version or 0))
        actor.has, actor.step = effect.version, actor.step + 1
    elif verb == "unpublish":
        actor.has, actor.step = None, actor.step + 1
        actor.memory = [TRAINED] * len(actor.memory)
    else:
        truth.judge_fill(small, actor, verb, effect.version, floor)
        actor.step += verb == "update"
        actor.has = effect.version
