"""How far the run is, made from the events as they come: what the director acts upon and the terminal shows."""

from .events import SERVER, TRAINER, AnyEvent, Ended, Fault, Generated, Kept, Published, Refilled, Trained, Updated

RECENT = 10  # steps of which the shown reward is the mean


class RolloutRow:
    """What is known of one rollout."""

    def __init__(self) -> None:
        self.state = "starts"
        self.version: int | None = None
        self.stall_s = 0.0
        self.samples = 0
        self.reward = 0.0
        self.bytes_by_source: dict[str, int] = {}


class Progress:
    """How far the run is; also what the director acts upon."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.version = -1  # published last
        self.is_trained = False
        self.rewards: list[float] = []
        self.rollouts: dict[str, RolloutRow] = {}
        self.news: list[str] = []

    def is_past(self, fraction: float) -> bool:
        """Whether this part of all steps is done."""
        return self.version >= fraction * self.steps

    def has_joined(self, replica: str) -> bool:
        """Whether it holds weights."""
        return replica in self.rollouts and self.rollouts[replica].version is not None

    def has_sampled(self, replica: str) -> bool:
        """Whether it has run its weights."""
        return replica in self.rollouts and self.rollouts[replica].samples > 0

    def take(self, events: list[AnyEvent]) -> None:
        """Learn what has happened."""
        for event in events:
            self._take(event)

    def _take(self, event: AnyEvent) -> None:
        match event:
            case Published():
                self.version = event.version
            case Trained():
                self.rewards.append(event.reward)
            case Updated():
                row = self._row(event.process)
                row.state, row.version, row.stall_s = "runs", event.version, event.stall_s
                row.bytes_by_source = event.bytes_by_source
                if event.is_first:
                    self.news.append(f"{event.process} joined with version {event.version}")
            case Kept():
                self._row(event.process).stall_s = event.stall_s
                why = event.error.partition(":")[0]
                self.news.append(f"{event.process} could not update ({why}), keeps version {event.version}")
            case Generated():
                row = self._row(event.process)
                row.samples += event.samples
                row.reward = event.reward
            case Refilled():
                self.news.append(f"{event.process} goes on from version {event.version}, which its rollouts hold")
            case Ended(process=process) if process == TRAINER:
                self.is_trained = True
            case Ended():
                self._row(event.process).state = "has left"
            case Fault():
                if event.process in self.rollouts:
                    self._row(event.process).state = event.what
                is_back = event.process == SERVER and event.what == "restarted"
                why_quiet = "; first it listens who is there" if is_back else ""
                self.news.append(f"{event.process} {event.what}, at version {event.version}{why_quiet}")
            case _:
                pass  # for the proofs at the end

    def _row(self, replica: str) -> RolloutRow:
        return self.rollouts.setdefault(replica, RolloutRow())

    @property
    def reward(self) -> float:
        """Mean over the last steps."""
        recent = self.rewards[-RECENT:]
        return sum(recent) / len(recent) if recent else 0.0
