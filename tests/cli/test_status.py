"""`status` and `watch`: the table says everything once, in words that fit the terminal."""

import io
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from tensorhub.cli.output import plain_text, shown, size_text, time_text
from tensorhub.cli.status import Watcher, draw_status, status_json, watch
from tensorhub.protocol.errors import ServerUnreachable
from tensorhub.protocol.status import CallView, ModelView, ReplicaView, Status, Transfer, VersionView, WorkerView

MIB = 1 << 20


def worker(shard: int, state: str = "holding", version: int | None = 7, **changes: Any) -> WorkerView:
    """A worker in good health; `changes` make it ill."""
    fields: dict[str, Any] = {
        "shard": shard,
        "state": state,
        "version": version,
        "done": 0,
        "chunks": 0,
        "size_bytes": 256 * MIB,
        "session": 5,
        "lease_left_s": 9.3,
        "connected": True,
        "readers": 0,
        "endpoints": (f"tcp://10.0.0.{shard}:41234",),
        "host": "node-a",
        "site": "",
        "reliable": True,
        "received_bytes": {},
    }
    return WorkerView(**(fields | changes))


def transfer(shard: int, done: int, **changes: Any) -> Transfer:
    """rollout-2 reads version 7 from rollout-1."""
    fields: dict[str, Any] = {
        "model": "policy",
        "version": 7,
        "shard": shard,
        "target": "rollout-2",
        "source": "rollout-1",
        "ticket": 100 + shard,
        "done": done,
        "chunks": 64,
        "size_bytes": 256 * MIB,
        "reason": "relay, full, idle, same host; best of 3",
    }
    return Transfer(**(fields | changes))


def busy(done: int = 32) -> Status:
    """A trainer, a rollout that has the latest, one that is filling, one that is poisoned and lacks a shard."""
    latest = VersionView(7, True, True, ("rollout-1", "trainer"), ("rollout-2",))
    gone = VersionView(6, False, True, (), (), "policy/rollout-3[0]")
    waiting = CallView(5, "update", "latest", 7, "waiting", "shard 1 has not arrived")
    failed = CallView(5, "replicate", 7, 7, "failed", "shard 1 of rollout-3 died")
    replicas = (
        ReplicaView(
            "rollout-1",
            2,
            (worker(0, readers=1, received_bytes={"trainer": 256 * MIB}), worker(1, received_bytes={"trainer": MIB})),
            CallView(5, "update", "latest", 7, "finished"),
        ),
        ReplicaView(
            "rollout-2",
            2,
            (
                worker(0, "filling", done=done, chunks=64),
                worker(1, "filling", done=1, chunks=64, connected=False, lease_left_s=3.2),
            ),
            waiting,
        ),
        ReplicaView("rollout-3", 2, (worker(0, "poisoned", None, reliable=False),), failed),
        ReplicaView("trainer", 2, (worker(0), worker(1)), None),
    )
    model = ModelView("policy", 2, 7, 512 * MIB, (latest, gone), replicas)
    reads = (transfer(0, done), transfer(1, 1, is_void=True, source="trainer"))
    return Status("tensorhub/6", 192.4, 0.0, (model,), reads, {"workers": 7})


def quiet(recovering_s: float = 0.0) -> Status:
    """Nobody is there."""
    return Status("tensorhub/6", 1.0, recovering_s, (), (), {})


UNFOLDED = 400  # columns in which no cell is folded


def drawn(status: Status, width: int, **options: object) -> str:
    """What a terminal of that width shows, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    console.print(draw_status(status, server="127.0.0.1:7450", width=width, **options))  # type: ignore[arg-type]
    return out.getvalue()


def words(text: str) -> str:
    """The text as one line, without what only moves it into columns."""
    return " ".join(text.split())


WIDTHS = (80, 100, 120, 130, 160, 200, 250)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("host", ["node-a", "gpu-node-17.cluster.local"])
def test_a_replica_that_does_nothing_takes_one_line(width: int, host: str) -> None:
    names = ["trainer", *(f"rollout-{n}" for n in range(8))]
    received = {"trainer": 33 << 30, "rollout-1": 14 << 30, "rollout-3": 2 << 30}
    of_each: dict[str, object] = {"host": host, "site": "eu-west", "size_bytes": 14 << 30, "received_bytes": received}
    replicas = tuple(
        ReplicaView(n, 1, (worker(0, reliable=n == "trainer", copies_left=2, **of_each),), None) for n in names
    )
    status = Status("p", 1.0, 0.0, (ModelView("policy", 1, 7, 14 << 30, (), replicas),), (), {})
    lines = drawn(status, width).splitlines()
    rows = lines[next(n for n, line in enumerate(lines) if "──" in line) + 1 :]
    assert [row.split()[0] for row in rows if row.strip()] == names
    said = drawn(status, width)
    assert host in said or width < 100
    assert said.count("copies: 0 B of 28.0 GiB") == len(names) or width < 200


@pytest.mark.parametrize("bars", [False, True])
def test_no_unit_is_cut_from_its_number_and_wider_takes_no_more_lines(bars: bool) -> None:
    told = {"transport": "tcp", "path": "4 streams", "rate_bytes_per_s": 3 << 30, "why": "local: it is on another host"}
    calm = busy()
    status = Status("p", 1.0, 0.0, calm.models, (transfer(0, 32, **told), *calm.transfers[1:]), {})
    heights = []
    for width in range(WIDTHS[0], WIDTHS[-1] + 1, 5):
        lines = drawn(status, width, bars=bars).splitlines()
        assert max(map(len, lines)) <= width
        cells = [cell for line in lines for cell in re.split(r"\s{2,}", line.strip())]
        assert not [cell for cell in cells if re.match(r"(B|[KMGT]iB|s|min)\b", cell)], width
        heights.append(len(lines))
    assert all(height <= heights[0] for height in heights)


@pytest.mark.parametrize("width", [80, 160])
def test_it_says_who_holds_what(width: int) -> None:
    text = drawn(busy(), width)
    assert "reference server 127.0.0.1:7450, up 3 min 12 s, 7 workers, 2 reads open" in text
    assert "policy  latest is 7, 2 shards, 512.0 MiB" in text
    assert "version 7 held by rollout-1, trainer; filling rollout-2" in text
    assert "version 6 held by no worker; policy/rollout-3[0] was the last" in text
    for fact in ("7 holding", "7 filling 50%", "7 filling 2%", "poisoned", "missing", "(spot)", "cut off, 3.2 s left"):
        assert fact in words(text), fact


def test_it_says_who_reads_from_whom_and_why() -> None:
    text = words(drawn(busy(), UNFOLDED))
    assert 'update("latest") is 7, waiting: shard 1 has not arrived' in text
    assert "reads from rollout-1, 128.0 MiB of 256.0 MiB: relay, full, idle, same host" in text
    assert "stops reading from trainer" in text
    assert "replicate(7), failed: shard 1 of rollout-3 died" in text
    assert text.count("update(") == 1, "a call that ended well is not news"


def test_it_says_that_an_update_has_kept_what_was_held() -> None:
    call = CallView(5, "update", "latest", 7, "finished", "r keeps version 7: no source of version 8 of m has answered")
    model = ModelView("m", 1, 8, 1024, (), (ReplicaView("r", 1, (worker(0),), call),))
    text = words(drawn(Status("1", 1.0, 0.0, (model,), (), {}), UNFOLDED))
    assert 'update("latest") is 7, finished: r keeps version 7: no source of version 8 of m has answered' in text


@pytest.mark.parametrize(("left", "says"), [(0, "copies: no room for one of 1.0 KiB"), (2, "copies: 0 B of 2.0 KiB")])
def test_it_says_whether_there_is_room_for_a_copy(left: int, says: str) -> None:
    replica = ReplicaView("r", 1, (worker(0, size_bytes=1024, copies_left=left),), None)
    model = ModelView("m", 1, None, 1024, (), (replica,))
    assert says in words(drawn(Status("1", 1.0, 0.0, (model,), (), {}), UNFOLDED))


def test_what_workers_say_of_themselves_is_shown_and_not_obeyed() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07"
    workers = (worker(0, host=evil, site=evil, endpoints=(f"{evil}://",), received_bytes={evil: 1}),)
    replica = ReplicaView("rollout-2", 1, workers, CallView(5, "update", "latest", 7, "waiting", evil))
    latest = VersionView(7, True, True, (evil,), (evil,))
    reads = (transfer(0, 1, transport=evil, path=evil, why=evil, reason=evil, source=evil),)
    status = Status("p", 1.0, 0.0, (ModelView("policy", 1, 7, 64, (latest,), (replica,)),), reads, {})
    text = drawn(status, UNFOLDED)
    assert text.count("\\x1b[2J") >= 9
    assert "\x1b" not in text


def test_shards_that_say_the_same_are_one_line() -> None:
    lagging = [worker(shard) for shard in range(64)]
    lagging[9] = worker(9, "filling", done=3, chunks=4)
    replica = ReplicaView("rollout-1", 64, tuple(lagging), None)
    latest = VersionView(7, True, True, (), ("rollout-1",))
    text = drawn(Status("p", 1.0, 0.0, (ModelView("policy", 64, 7, 64, (latest,), (replica,)),), (), {}), 80)
    assert "0-8, 10-63" in text
    assert "7 filling  75%" in text
    assert len(text.splitlines()) < 12


def test_json_is_the_whole_picture() -> None:
    assert msgspec.convert(json.loads(status_json(busy())), Status) == busy()


def test_of_who_is_cut_off_nobody_knows_the_rate() -> None:
    told = transfer(0, 32, transport="tcp", rate_bytes_per_s=3 << 30)
    for is_there in (True, False):
        reader = ReplicaView("rollout-2", 1, (worker(0, "filling", connected=is_there),), None)
        model = ModelView("policy", 1, 7, 64, (), (reader,))
        text = words(drawn(Status("p", 1.0, 0.0, (model,), (told,), {}), UNFOLDED))
        assert ("at 3.0 GiB/s" in text) == is_there


def test_a_host_copy_of_who_is_cut_off_is_named_as_such() -> None:
    away = ReplicaView("r", 2, (worker(0, connected=False, copies=(6,)), worker(1, copies=(7,))), None)
    well = ReplicaView("s", 1, (worker(0, copies=(6,)),), None)
    kept = tuple(VersionView(n, n == 7, True, (), (), host_copies=who) for n, who in ((7, ("r",)), (6, ("r", "s"))))
    text = words(drawn(Status("p", 1.0, 0.0, (ModelView("policy", 1, 7, 64, kept, (away, well)),), (), {}), 160))
    assert "version 7 held in host memory only; host copies: r version 6" in text, "its other shard has that copy"
    assert "version 6 held in host memory only; host copies: r (cut off), s" in text


def test_where_all_is_lost_nobody_reads_that_nothing_was_published() -> None:
    lost = VersionView(7, False, True, (), (), last_holder="policy/t[0]", is_lost=True)
    text = words(drawn(Status("p", 1.0, 0.0, (ModelView("policy", 1, None, 64, (lost,), ()),), (), {}), 160))
    assert "policy all versions are lost" in text
    assert "nothing published" not in text


def test_the_writer_and_the_replica_that_has_pinned_a_version_are_named() -> None:
    trainer = ReplicaView("t", 1, (worker(0, "empty", None, is_writer=True),), None)
    keeper = ReplicaView("r", 2, (worker(0, pins=(6,)), worker(1, pins=(6,))), None)
    kept = tuple(VersionView(n, n == 7, True, ("r",), (), is_retained=True) for n in (7, 6))
    text = words(drawn(Status("p", 1.0, 0.0, (ModelView("policy", 1, 7, 64, kept, (keeper, trainer)),), (), {}), 160))
    assert "version 6 held by r; kept; pinned by r" in text
    assert "t 0 empty writer" in text


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


def test_the_rate_of_a_read_is_what_its_target_reports_also_where_it_is_0() -> None:
    def told(done: int, rate: int) -> Status:
        status = busy(done)
        reads = tuple(replace(each, transport="tcp", rate_bytes_per_s=rate) for each in status.transfers)
        return replace(status, transfers=reads)

    watcher = watcher_of([busy(done=16), told(32, 5 << 20), told(32, 0)])
    assert "/s" not in look(watcher), "unknown is not 0"
    assert "of 256.0 MiB at 5.0 MiB/s" in look(watcher)
    assert "of 256.0 MiB at 0 B/s" in look(watcher)


def test_a_server_that_goes_away_leaves_its_last_picture() -> None:
    watcher = watcher_of([busy(), None, None, busy()])
    look(watcher)
    assert "no answer for 0 s" in look(watcher)
    assert "no answer for 1 s" in (away := look(watcher))
    assert "version 7 held by" in away
    assert "no answer" not in look(watcher)


def test_without_a_terminal_it_prints_one_below_the_other() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
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


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (50 * 2**30, "50.0 GiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.3, "9.3 s"),
        (9.96, "10 s"),
        (59.7, "1 min 00 s"),
        (192.4, "3 min 12 s"),
        (3600, "1 h 00 min"),
        (90061, "1 d 01 h"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer, 重み", "größer, 重み"),
        ("two\nlines", "two\nlines"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("back\rwards\t\u202e", "back\\rwards\\t\\u202e"),
    ],
)
def test_no_terminal_obeys_what_is_shown(text: str, shown: str) -> None:
    assert plain_text(text) == shown
