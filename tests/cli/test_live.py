"""`watch`: rates from one picture to the next, and patience with a server that is away."""

import io
import signal
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from rich.console import Console

from tensorhub.cli.output import shown
from tensorhub.cli.status import Watcher, watch
from tensorhub.protocol.errors import ServerUnreachable
from tensorhub.protocol.status import Status

from .pictures import busy


def watcher_of(answers: list[Status | None]) -> Watcher:
    """Sees these answers, one a second; None is a server that does not answer."""
    told: Iterator[Status | None] = iter(answers)
    ticks = iter(range(1000))

    def ask() -> Status:
        answer = next(told)
        if answer is None:
            raise ServerUnreachable("no reference server at 127.0.0.1:7450")
        return answer

    return Watcher("127.0.0.1:7450", ask, clock=lambda: float(next(ticks)))


def look(watcher: Watcher) -> str:
    """One picture as words."""
    out = io.StringIO()
    Console(file=out, width=400, force_terminal=False).print(watcher.look(400))
    return " ".join(out.getvalue().split())


def test_rates_come_from_two_pictures() -> None:
    watcher = watcher_of([busy(done=16), busy(done=32)])
    assert "/s" not in look(watcher)
    assert "128.0 MiB of 256.0 MiB at 64.0 MiB/s" in look(watcher)


def test_between_two_reports_the_rate_stays() -> None:
    """A worker tells its progress once a second; a quicker watcher sees nothing move in between."""
    watcher = watcher_of([busy(done=16), busy(done=32), busy(done=32), busy(done=64)])
    assert "64.0 MiB/s" in [look(watcher), look(watcher)][1]
    assert "64.0 MiB/s" in look(watcher)
    assert "64.0 MiB/s" in look(watcher), "128 MiB in the 2 s since it last moved"


def test_a_read_that_stands_still_loses_its_rate() -> None:
    """After two reports without progress the former rate says nothing about the read any more."""
    watcher = watcher_of([busy(done=16), busy(done=32), *[busy(done=32)] * 6, busy(done=64)])
    seen = ["at 64.0 MiB/s" in look(watcher) for _ in range(8)]
    assert seen == [False, True, True, True, False, False, False, False]
    assert "at 18.3 MiB/s" in look(watcher), "128 MiB in the 7 s since it last moved"


def test_where_workers_report_more_seldom_the_rate_stays_for_longer() -> None:
    seldom: list[Status | None] = [replace(busy(done), report_s=2.5) for done in (16, 32, *[32] * 6)]
    watcher = watcher_of(seldom)
    seen = ["at 64.0 MiB/s" in look(watcher) for _ in seldom]
    assert seen == [False, *[True] * 6, False]


def test_what_has_not_moved_yet_has_no_rate() -> None:
    watcher = watcher_of([busy(done=16), busy(done=16)])
    assert "/s" not in look(watcher) + look(watcher), "unknown is not 0"


def test_the_rate_that_a_transport_reports_is_the_rate_also_where_it_is_0() -> None:
    def told(done: int, rate: int) -> Status:
        status = busy(done)
        reads = tuple(replace(each, transport="tcp", rate_bytes_per_s=rate) for each in status.transfers)
        return replace(status, transfers=reads)

    watcher = watcher_of([told(16, 5 << 20), told(32, 5 << 20), told(32, 0)])
    look(watcher)
    assert "of 256.0 MiB at 5.0 MiB/s" in look(watcher), "not 64, which is what two pictures say"
    assert "of 256.0 MiB at 0 B/s" in look(watcher)


def test_a_server_that_goes_away_leaves_its_last_picture() -> None:
    watcher = watcher_of([busy(), None, None, busy()])
    look(watcher)
    assert "no answer for 0 s" in look(watcher)
    assert "no answer for 1 s" in (away := look(watcher))
    assert "version 7 held by" in away
    assert "no answer" not in look(watcher)


def test_a_server_that_never_was_is_an_error() -> None:
    with pytest.raises(ServerUnreachable):
        watcher_of([None]).look(80)


def test_without_a_terminal_it_prints_one_below_the_other() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    watch(watcher_of([busy(), busy()]), console, every_s=0.01, times=2)
    assert out.getvalue().count("reference server") == 2


def test_on_a_dumb_terminal_it_prints_one_below_the_other() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, _environ={"TERM": "dumb"})
    watch(watcher_of([busy(), busy()]), console, every_s=0.01, times=2)
    assert out.getvalue().count("reference server") == 2


class Slow:
    """A display that a signal meets while it starts, or while it stops."""

    def __init__(self, at: str, number: signal.Signals) -> None:
        self.at, self.number = at, number
        self.did: list[str] = []

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def _do(self, what: str) -> None:
        if what == self.at:
            signal.raise_signal(self.number)
        self.did.append(what)


@pytest.mark.parametrize("at", ["start", "stop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_display_is_started_and_stopped_in_one_piece(at: str, number: signal.Signals) -> None:
    """A display that was begun by half cannot be taken back."""
    display, before = Slow(at, number), signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, shown(display):
            display.did.append("block")
        assert ended.value.code == 128 + number
        assert display.did == (["start", "stop"] if at == "start" else ["start", "block", "stop"])
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with shown(Slow("never", signal.SIGHUP)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_on_a_terminal_it_draws_in_place() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=60, force_terminal=True, _environ={"TERM": "xterm-256color"})
    watch(watcher_of([busy(), busy()]), console, every_s=0.01, times=2)
    assert "\x1b[" in out.getvalue()
