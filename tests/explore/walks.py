"""Single histories, drawn at random and followed to their end: what lies deeper than a search gets."""

from random import Random

from . import truth
from .search import MISTAKES
from .small import MISFORTUNES, TIME, Faults, Shape, Small

LONGEST = 300  # steps
AT_REST = 8  # seconds in which nothing happened: two leases and more


def follow(shape: Shape, budget: Faults, seed: int) -> tuple[str, list[int]]:
    """How a promise was broken, if one was, and the choices up to there."""
    chance, small, history, idle_s = Random(seed), Small.begin(shape, budget), [], 0
    weights = {"time passes": chance.choice((0.02, 0.2)), "server hears": chance.choice((0.3, 1.0, 3.0))}
    misfortune = chance.choice((0.0, 0.01, 0.04, 0.1))
    weights.update(dict.fromkeys(MISFORTUNES, misfortune))
    for _ in range(LONGEST):
        actions = small.actions()
        is_idle = all(action == TIME or action[0] in MISFORTUNES for action in actions)
        idle_s = idle_s + 1 if is_idle else 0
        number = chance.choices(range(len(actions)), [weights.get(action[0], 1.0) for action in actions])[0]
        if is_idle and idle_s > 1:
            number = actions.index(TIME)
        history.append(number)
        try:
            if idle_s > AT_REST:
                truth.at_rest(small)
                break
            small.apply(actions[number])
        except MISTAKES as error:
            return f"{type(error).__name__}: {error}", history
    return "", history
