"""The status table says everything once, in words that fit the terminal."""

import io
import json
import re

import msgspec
import pytest
from rich.console import Console

from tensorhub.cli.status import _reading, draw_status, status_json
from tensorhub.protocol.status import CallView, ModelView, ReplicaView, Status, VersionView

from .pictures import busy, quiet, transfer, worker

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


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("bars", [False, True])
def test_it_fits(width: int, bars: bool) -> None:
    lines = drawn(busy(), width, bars=bars).splitlines()
    assert max(len(line) for line in lines) <= width


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
    for width in range(WIDTHS[0], WIDTHS[-1] + 1):
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
    assert "version 6 held by nobody; policy/rollout-3[0] was the last" in text
    for fact in ("7 holding", "7 filling 50%", "7 filling 2%", "poisoned", "missing", "(spot)", "cut off, 3.2 s left"):
        assert fact in words(text), fact


def test_it_says_who_reads_from_whom_and_why() -> None:
    text = words(drawn(busy(), UNFOLDED, rates={100: 2.0**28}))
    assert 'update("latest") is 7, waiting: shard 1 has not arrived' in text
    assert "reads from rollout-1, 128.0 MiB of 256.0 MiB at 256.0 MiB/s: relay, full, idle, same host" in text
    assert "stops reading from trainer" in text
    assert "replicate(7), failed: shard 1 of rollout-3 died" in text
    assert text.count("update(") == 1, "a call that ended well is not news"


def test_wide_terminals_see_places_and_bytes_by_source() -> None:
    assert "257.0 MiB from trainer" in drawn(busy(), UNFOLDED), "both shards of rollout-1 together"
    assert "node-a" in drawn(busy(), 160)
    assert "node-a" not in drawn(busy(), 80)


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


def test_nobody_is_there() -> None:
    assert "No model yet" in drawn(quiet(), 80)
    assert "recovering: for up to 4.0 s" in drawn(quiet(4.0), 80)


def test_names_are_not_markup() -> None:
    """A model may be called what rich would take for a colour."""
    replica = ReplicaView("[red]x[/red]", 1, (worker(0),), None)
    model = ModelView("[bold]m", 1, None, 1, (), (replica,))
    text = drawn(Status("p", 1.0, 0.0, (model,), (transfer(0, 1, model="[bold]m"),), {}), 160)
    assert "[bold]m" in text
    assert "[red]x[/red]" in text


def test_json_is_the_whole_picture() -> None:
    assert msgspec.convert(json.loads(status_json(busy())), Status) == busy()


def test_a_read_says_how_it_goes_and_why_not_a_better_way() -> None:
    told = {"transport": "tcp", "path": "2 streams", "why": "local: it is on another host", "rate_bytes_per_s": 3 << 30}
    text = Console(width=200, record=True, file=io.StringIO())
    text.print(_reading(transfer(0, 32, **told), {}))
    shown = text.export_text()
    assert "reads from rollout-1 by tcp, 128.0 MiB of 256.0 MiB at 3.0 GiB/s" in shown
    assert "2 streams" in shown
    assert "not by local: it is on another host" in shown


def test_of_who_is_cut_off_nobody_knows_the_rate() -> None:
    told = transfer(0, 32, transport="tcp", rate_bytes_per_s=3 << 30)
    for is_there in (True, False):
        reader = ReplicaView("rollout-2", 1, (worker(0, "filling", connected=is_there),), None)
        model = ModelView("policy", 1, 7, 64, (), (reader,))
        text = words(drawn(Status("p", 1.0, 0.0, (model,), (told,), {}), UNFOLDED))
        assert ("at 3.0 GiB/s" in text) == is_there


def test_a_holder_that_is_cut_off_is_named_as_such() -> None:
    well, away = (
        ReplicaView(name, 1, (worker(0, connected=is_there),), None) for name, is_there in (("t", True), ("r", False))
    )
    held = VersionView(7, True, True, ("r", "t"), ())
    text = words(drawn(Status("p", 1.0, 0.0, (ModelView("policy", 1, 7, 64, (held,), (well, away)),), (), {}), 160))
    assert "version 7 held by r (cut off), t" in text


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


def test_who_has_claimed_a_number_and_who_has_pinned_one_is_named() -> None:
    trainer = ReplicaView("t", 1, (worker(0, "empty", None, claim=8),), None)
    keeper = ReplicaView("r", 2, (worker(0, pins=(6,)), worker(1, pins=(6,))), None)
    kept = tuple(VersionView(n, n == 7, True, ("r",), (), is_retained=True) for n in (7, 6))
    text = words(drawn(Status("p", 1.0, 0.0, (ModelView("policy", 1, 7, 64, kept, (keeper, trainer)),), (), {}), 160))
    assert "version 6 held by r; kept; pinned by r" in text
    assert "t 0 empty is to publish 8" in text
