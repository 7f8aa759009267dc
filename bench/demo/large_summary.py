"""What a run with a large model has shown: each version, each rollout, the one that was killed, and checks. Pure."""

from statistics import median

import msgspec

from ..section import size_text
from .checks import Check

UNDISTURBED = 3  # versions before one in which a source is killed


class Fetch(msgspec.Struct, frozen=True):
    """How one rollout got one version. Times are seconds since it was published."""

    rollout: str
    began_s: float
    ended_s: float
    bytes_by_source: dict[str, int]
    curve: list[tuple[float, str, int]]  # when, of which source, how many bytes of it so far
    is_right: bool  # its bytes have the trainer's digest

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def received_at(self, at_s: float) -> int:
        """Bytes that had come."""
        return sum({source: size_bytes for when, source, size_bytes in self.curve if when <= at_s}.values())


class Round(msgspec.Struct, frozen=True):
    """One version: published by the trainer, fetched by every rollout at once."""

    version: int
    stall_s: float  # of the trainer, in unpublish and publish
    sent_bytes: int  # by the trainer
    fetches: list[Fetch]
    peak_bytes: int  # of all processes, so far

    @property
    def seconds(self) -> float:
        return max(fetch.ended_s for fetch in self.fetches)


class Disturbed(msgspec.Struct, frozen=True):
    """How a rollout got the version in which another one was killed."""

    rollout: str
    share: float | None  # of the model that it had by then; None if it did not read from the one that was killed
    pause_s: float  # from then until bytes of a source that lives came
    seconds: float
    usual_s: float  # its median of the undisturbed versions

    @property
    def is_reader(self) -> bool:
        return self.share is not None

    @property
    def longer_s(self) -> float:
        return self.seconds - self.usual_s


class Kill(msgspec.Struct, frozen=True):
    """A rollout was killed `at_s` seconds after `version` was published."""

    version: int
    rollout: str
    at_s: float
    disturbed: list[Disturbed]


class Large(msgspec.Struct, frozen=True):
    """The whole run."""

    size_bytes: int
    rollouts: int
    seconds: float
    rounds: list[Round]
    kill: Kill | None

    @property
    def undisturbed(self) -> list[Round]:
        """Those from which usual figures are taken: not the first, in which rollouts connect."""
        return self.rounds[1:UNDISTURBED]

    def rate(self, one: Round) -> float:
        """Bytes a second of all rollouts together."""
        return len(one.fetches) * self.size_bytes / one.seconds


def kill_of(rollout: str, at_s: float, readers: dict[str, float], rounds: list[Round]) -> Kill:
    """The rollout was killed in the last of the rounds. `readers` had that share of the model by then."""
    found = []
    for fetch in rounds[-1].fetches:
        usual = [each.seconds for one in rounds[1:UNDISTURBED] for each in one.fetches if each.rollout == fetch.rollout]
        after = [when for when, source, _ in fetch.curve if when > at_s and source != rollout]
        pause_s = min(after, default=fetch.ended_s) - at_s
        found.append(Disturbed(fetch.rollout, readers.get(fetch.rollout), pause_s, fetch.seconds, median(usual)))
    return Kill(rounds[-1].version, rollout, at_s, found)


def judge(large: Large) -> list[Check]:
    """Every check of a run."""
    fetches = [fetch for one in large.rounds for fetch in one.fetches]
    wrong = [fetch for fetch in fetches if not fetch.is_right]
    detail = f"{len(fetches)} XXH3 digests of the whole model compared, {len(wrong)} differ"
    bytes_right = Check("every rollout has the trainer's bytes in every version", not wrong, detail)
    return [bytes_right, _shared(large), *_survived(large)]


def _shared(large: Large) -> Check:
    sent = sum(one.sent_bytes for one in large.undisturbed)
    received = sum(sum(each.bytes_by_source.values()) for one in large.undisturbed for each in one.fetches)
    sentence = "rollouts read from each other: the trainer sent less than half of what they received"
    detail = f"{size_text(sent)} of {size_text(received)} in versions {_numbers(large.undisturbed)}"
    return Check(sentence, sent < received / 2, detail)


def _survived(large: Large) -> list[Check]:
    kill, sentence = large.kill, "a rollout was killed while others read from it, and these have the right bytes"
    if kill is None:
        return [Check(sentence, False, "the model had come before a rollout could be killed; a larger --size helps")]
    names = {each.rollout for each in kill.disturbed if each.is_reader}
    right = {
        fetch.rollout for one in large.rounds if one.version == kill.version for fetch in one.fetches if fetch.is_right
    }
    last = large.rounds[-1]
    went_on = last.version > kill.version and len(last.fetches) == large.rollouts - 1
    return [
        Check(sentence, bool(names) and names <= right, f"{kill.rollout}, read by {', '.join(sorted(names))}"),
        Check("the others got the next version", went_on, f"{len(last.fetches)} rollouts hold version {last.version}"),
    ]


def _numbers(rounds: list[Round]) -> str:
    return f"{rounds[0].version} to {rounds[-1].version}"
