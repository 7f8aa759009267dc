"""What the terminal shows while the demo runs; where there is no terminal, a line now and then."""

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .events import TRAINER
from .logs import now
from .progress import Progress, RolloutRow

SPARKS = "▁▂▃▄▅▆▇█"
NEWS_SHOWN = 6
PLAIN_EVERY = 10  # steps between two lines
MIB = 1 << 20


class Display:
    """Shows `progress` whenever told to draw."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._began = now()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_step = 0
        self._news_told = 0

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def draw(self) -> None:
        """How things are now."""
        seconds = now() - self._began
        if self._live is not None:
            self._live.update(picture(self._progress, seconds), refresh=True)
            return
        for news in self._progress.news[self._news_told :]:
            self._console.print(f"{seconds:6.1f} s  {news}", highlight=False)
        self._news_told = len(self._progress.news)
        if self._progress.version >= self._next_step:
            self._console.print(f"{seconds:6.1f} s  {_headline(self._progress)}", highlight=False)
            self._next_step = self._progress.version // PLAIN_EVERY * PLAIN_EVERY + PLAIN_EVERY


def picture(progress: Progress, seconds: float) -> RenderableType:
    """The whole picture: progress, rewards so far, the rollouts, what has happened lately."""
    bar = Table.grid(padding=(0, 1))
    steps = max(progress.version, 0)
    bar.add_row(ProgressBar(total=progress.steps, completed=steps, width=30), f"{seconds:.0f} s  {_headline(progress)}")
    news = Text("\n".join(progress.news[-NEWS_SHOWN:]), style="yellow")
    return Group(bar, Text(sparkline(progress.rewards), style="green"), _table(progress), news)


def sparkline(values: list[float], *, width: int = 60) -> str:
    """Values from 0 to 1 as a row of bars; several values share one where there are more than `width`."""
    each = -(-len(values) // width) or 1
    means = [sum(part) / len(part) for part in (values[i : i + each] for i in range(0, len(values), each))]
    return "".join(SPARKS[min(int(mean * len(SPARKS)), len(SPARKS) - 1)] for mean in means)


def _headline(progress: Progress) -> str:
    if progress.version < 0:
        return "the processes start"
    return f"step {progress.version} of {progress.steps}, reward {progress.reward:.2f}"


def _table(progress: Progress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rollout")
    table.add_column("", min_width=12)
    for heading in ("version", "reward", "samples", "last stall", "from trainer", "from rollouts"):
        table.add_column(heading, justify="right")
    for name, row in sorted(progress.rollouts.items()):
        table.add_row(name, *_cells(row), style="dim" if row.state in ("killed", "has left") else None)
    return table


def _cells(row: RolloutRow) -> list[str]:
    from_trainer = row.bytes_by_source.get(TRAINER, 0)
    from_rollouts = sum(row.bytes_by_source.values()) - from_trainer
    return [
        row.state,
        "–" if row.version is None else str(row.version),
        f"{row.reward:.2f}",
        f"{row.samples:,}",
        f"{row.stall_s * 1000:.0f} ms",
        f"{from_trainer / MIB:.1f} MiB",
        f"{from_rollouts / MIB:.1f} MiB",
    ]
