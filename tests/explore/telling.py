"""A history as readable lines: what happened, and under it what everybody heard, said and did."""

from scenarios.words import Words
from tensorhub.protocol.messages import Orders, Refusal, ToServer
from tensorhub.worker import events

from . import search
from .small import Action, Faults, Shape, Small


class Teller:
    """Writes down what happens in a small cluster."""

    def __init__(self) -> None:
        self.words = Words()
        self.lines: list[str] = []

    def action(self, number: int, action: Action) -> None:
        self.lines.append(f"{number:3d}  {' '.join([action[-1], *action[:-1]])}")

    def say(self, text: str | None) -> None:
        if text is not None:
            self.lines.append(f"       {text}")

    def server_hears(self, who: str, message: ToServer | None) -> None:
        self.say(f"{who} is gone, the server notices" if message is None else self.words.to_server(who, message))

    def hears(self, who: str, message: Orders | Refusal) -> None:
        self.say(self.words.to_worker(who, message))

    def wants(self, who: str, effect: events.Effect) -> None:
        self.say(self.words.effect(who, effect))


def told(shape: Shape, budget: Faults, history: list[int]) -> list[str]:
    """The history, played again from the start."""
    small = Small.begin(shape, budget)
    small.teller = Teller()
    for number, choice in enumerate(history, start=1):
        action = small.actions()[choice]
        small.teller.action(number, action)
        try:
            small.apply(action)
        except search.MISTAKES as error:
            small.teller.say(f"=> {type(error).__name__}: {error}")
            break
    states = [f"{a.name}: {a.worker.buffer}, memory {a.memory}, copies {a.copies}" for a in small.actors.values()]
    return [*small.teller.lines, *states]
