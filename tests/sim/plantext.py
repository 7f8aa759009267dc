"""A plan as a short text that people read and tests run again.

    # one SIGKILL of the trainer must not take the version before along
    seed 40
    settings lease_s=2.0
    conditions shards=2 chunks=1
    trainer policy/trainer host=host-t
      publish rest_s=0.3
    rollout policy/rollout-0 reliable=False
      update latest timeout_s=2.0
    at 3.25 crash policy/trainer[0] for 1.5
    message policy/rollout-0[0]#1 up 12 after 2.25
    fault policy/rollout-0[0]#1 error 4

What is not said is as by default. A program makes its steps, and plain ones when they are over. A message with no
`after` is lost, with two it is doubled. `drawn`: what becomes of messages and chunks comes from the seed's streams.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.messages import VERBS
from tensorhub.protocol.settings import Settings

from .plan import KINDS, Conditions, Fate, Misfortune, Plan, Replica, Step

T = TypeVar("T", Settings, Conditions, Replica, Step)
DRAWN = "drawn"
HIDDEN = ("model", "name", "is_trainer", "steps", "verb", "spec")  # fields that a line says in its own way


def render(plan: Plan, why: str = "") -> str:
    """The plan as text."""
    lines = [f"# {line}" for line in why.splitlines()]
    lines.append(f"seed {plan.seed}")
    lines.append(f"settings {_differences(plan.settings, Settings())}".rstrip())
    lines.append(f"conditions {_differences(plan.conditions, Conditions())}".rstrip())
    for replica in plan.replicas:
        kind = "trainer" if replica.is_trainer else "rollout"
        plain = Replica(replica.model, replica.name)
        lines.append(f"{kind} {replica.model}/{replica.name} {_differences(replica, plain)}".rstrip())
        lines += [f"  {step.verb} {step.spec} {_differences(step, Step())}".rstrip() for step in replica.steps]
    lines += [_misfortune(each) for each in plan.misfortunes]
    lines += [DRAWN] if plan.fates is None else [_fate(fate) for fate in plan.fates]
    return "\n".join(lines) + "\n"


def _differences(value: Settings | Conditions | Replica | Step, plain: object) -> str:
    found = []
    for field in fields(value):
        mine = getattr(value, field.name)
        if field.name not in HIDDEN and mine != getattr(plain, field.name):
            found.append(f"{field.name}={mine}")
    return " ".join(found)


def _misfortune(each: Misfortune) -> str:
    target = f" {each.target}" if each.target else ""
    other = f" from {each.other}" if each.other else ""
    value = f" value {each.value}" if each.value else ""
    return f"at {each.at_s} {each.kind}{target}{other} for {each.length_s}{value}"


def _fate(fate: Fate) -> str:
    if fate.direction in ("up", "down"):
        after = "".join(f" after {delay_s}" for delay_s in fate.delays)
        return f"message {fate.process} {fate.direction} {fate.number}{after}"
    return f"fault {fate.process} {fate.direction} {fate.number}"


# --- and back ---------------------------------------------------------------------------------------------------------


def parse(text: str) -> Plan:
    """The plan that the text says. Raises `UsageError` if it says none."""
    seed, settings, conditions = "", Settings(), Conditions()
    replicas: list[Replica] = []
    misfortunes: list[Misfortune] = []
    fates: list[Fate] | None = []
    for number, line in _lines(text):
        word, _, rest = line.strip().partition(" ")
        try:
            if line.startswith(" "):
                if word not in VERBS:
                    raise ValueError(f"no call is named {word!r}; one of {', '.join(VERBS)}")
                spec, _, more = rest.partition(" ")
                step = _changed(Step(verb=word, spec=int(spec) if spec.isdigit() else spec), more)
                replicas[-1] = replace(replicas[-1], steps=(*replicas[-1].steps, step))
            elif word == "seed":
                seed = rest
            elif word == "settings":
                settings = _changed(settings, rest)
            elif word == "conditions":
                conditions = _changed(conditions, rest)
            elif word in ("trainer", "rollout"):
                replicas.append(_replica(word, rest))
            elif word == "at":
                misfortunes.append(_parse_misfortune(rest))
            elif word in ("message", "fault"):
                fates = [*(fates or []), _parse_fate(rest)]
            elif word == DRAWN:
                fates = None
            else:
                raise ValueError(f"no line begins with {word!r}")
        except (ValueError, IndexError, KeyError, AttributeError) as error:
            raise UsageError(f"line {number} of the plan: {line.strip()!r}: {error}") from error
    return Plan(
        seed, settings, conditions, tuple(replicas), tuple(misfortunes), None if fates is None else tuple(fates)
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line.rstrip()


def _changed(value: T, words: str) -> T:
    changes: dict[str, Any] = {}
    for word in words.split():
        name, _, text = word.partition("=")
        old = getattr(value, name)
        changes[name] = text == "True" if isinstance(old, bool) else type(old)(text)
    return replace(value, **changes)


def _replica(kind: str, rest: str) -> Replica:
    name, _, more = rest.partition(" ")
    model, _, replica = name.partition("/")
    return _changed(Replica(model, replica, kind == "trainer"), more)


def _parse_misfortune(rest: str) -> Misfortune:
    at_s, kind, *words = rest.split()
    if kind not in KINDS:
        raise ValueError(f"no misfortune is called {kind!r}")
    target = words.pop(0) if words[0] not in ("for", "from") else ""
    said = dict(zip(words[::2], words[1::2], strict=True))
    value = float(said.get("value", 0.0))
    return Misfortune(float(at_s), kind, target, float(said["for"]), said.get("from", ""), value)


def _parse_fate(rest: str) -> Fate:
    process, direction, number, *words = rest.split()
    return Fate(process, direction, int(number), tuple(float(word) for word in words[1::2]))
