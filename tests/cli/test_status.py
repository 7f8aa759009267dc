"""`status` and `watch`: one screen at any width says who is behind, what each waits for, and since when."""

import io
import json
import re
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from tensorhub.cli.output import plain_text, shown, size_text, time_text
from tensorhub.cli.status import SCREEN_LINES, draw_status, only, status_json
from tensorhub.cli.watch import DOWN, END, HOME, PAGE_DOWN, Page, Watcher, watch, watch_json
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
    return Status("tensorhub/7", 192.4, 0.0, (model,), reads, {"workers": 7})


def quiet(recovering_s: float = 0.0) -> Status:
    """Nobody is there."""
    return Status("tensorhub/7", 1.0, recovering_s, (), (), {})


UNFOLDED = 400  # columns in which no cell is folded


def lines_of(status: Status, width: int, **options: object) -> list[str]:
    """What a terminal of that width shows, without colours."""
    return [line.plain for line in draw_status(status, server="127.0.0.1:7450", width=width, **options)]  # type: ignore[arg-type]


def drawn(status: Status, width: int, **options: object) -> str:
    """The same as one text."""
    return "\n".join(lines_of(status, width, **options))


def words(text: str) -> str:
    """The text as one line, without what only moves it into columns."""
    return " ".join(text.split())


def job(*replicas: ReplicaView, reads: tuple[Transfer, ...] = (), versions: tuple[VersionView, ...] = ()) -> Status:
    """One model, of which version 7 is the latest."""
    model = ModelView("policy", max(each.shards for each in replicas), 7, 512 * MIB, versions, replicas)
    return Status("tensorhub/7", 192.4, 0.0, (model,), reads, {})


READING = {"transport": "tcp", "path": "4 streams", "rate_bytes_per_s": 3 << 30, "why": "local: it is on another host"}
V7 = VersionView(7, True, True, ("trainer", "rollout-0"), ("rollout-1",), age_s=34.0)
V6 = VersionView(6, False, True, ("rollout-2",), (), host_copies=("trainer",), is_retained=True, age_s=95.0)
V5 = VersionView(5, False, True, ("rollout-3",), (), age_s=156.0)


def small(prefix: str = "") -> Status:
    """A trainer and eight rollouts, of which one reads, three are behind, and one is stopped."""
    names = [f"{prefix}rollout-{number}" for number in range(8)]
    received = {f"{prefix}trainer": 33 << 30, f"{prefix}rollout-1": 14 << 30}
    behind = {2: 6, 3: 5, 4: 6}
    rollouts = [
        ReplicaView(
            name,
            1,
            (worker(0, version=behind.get(number, 7), copies_left=2, received_bytes=received, heard_s=0.4),),
            None,
        )
        for number, name in enumerate(names)
    ]
    called = CallView(9, "update", "latest", 7, "running", "", 12.0)
    rollouts[1] = ReplicaView(names[1], 1, (worker(0, "filling", done=3, chunks=64, waits_s=12.0),), called)
    rollouts[2] = ReplicaView(names[2], 1, (worker(0, version=6, heard_s=9.1, is_silent=True, lease_left_s=0.9),), None)
    trainer = ReplicaView(f"{prefix}trainer", 1, (worker(0, readers=1, is_writer=True, heard_s=0.2),), None)
    told = transfer(0, 3, target=names[1], source=f"{prefix}trainer", since_s=12.0, **READING)
    return job(*rollouts, trainer, reads=(told,), versions=(V7, V6, V5))


def stalled() -> Status:
    """A read that brings nothing, because its source is stopped."""
    waits = "rollout-1 was not heard for 9.4 s"
    called = CallView(9, "update", "latest", 7, "running", waits, 12.0)
    reader = ReplicaView("rollout-2", 1, (worker(0, "filling", done=3, chunks=64, waiting_for=waits),), called)
    read = transfer(0, 3, **(READING | {"rate_bytes_per_s": 0}), since_s=12.0, still_s=9.4, waiting_for=waits)
    source = ReplicaView("rollout-1", 1, (worker(0, heard_s=9.4, is_silent=True),), None)
    return job(reader, source, reads=(read,), versions=(V7,))


def large() -> Status:
    """2,000 workers: most hold the latest version, hundreds read it, some are behind, some are not heard."""
    replicas = []
    reads = []
    for number in range(250):
        name = f"rollout-{number:04}"
        called = CallView(9, "update", "latest", 7, "running", "", 1.0) if number % 5 == 0 else None
        workers = tuple(
            worker(shard, "filling", 7, done=shard, chunks=64)
            if called is not None
            else worker(shard, version=6 if number % 7 == 0 else 7, is_silent=number % 50 == 1, heard_s=number % 9)
            for shard in range(8)
        )
        replicas.append(ReplicaView(name, 8, workers, called))
        reads += [transfer(shard, shard, target=name, **READING) for shard in range(8) if called is not None]
    holders = tuple(each.name for each in replicas)
    return job(*replicas, reads=tuple(reads), versions=(replace(V7, holders=holders, filling=holders), V6))


def several() -> Status:
    """A policy and its draft, and a model of which nothing was published."""
    policy, draft = small().models[0], busy().models[0]
    models = (policy, replace(draft, name="draft"), ModelView("reward", 1, None, 0, (), ()))
    return replace(small(), models=models)


def cross_site() -> Status:
    """Two sites; one worker of B reads from A, and the others of B read from that one."""
    latest = replace(V7, cross_site_bytes={"eu-west": 512 * MIB, "us-east": 7 * MIB})
    replicas = [
        ReplicaView(f"rollout-{n}", 2, (worker(0, site="eu-west"), worker(1, "filling", site="eu-west")), None)
        for n in range(3)
    ]
    reads = tuple(transfer(1, 9, target=f"rollout-{n}", is_cross_site=n == 0, **READING) for n in range(3))
    return job(*replicas, reads=reads, versions=(latest,))


def across() -> Status:
    """A rollout of four shards reads from a trainer of two, which has another layout."""
    reason = "across, from 2 shards: publisher, full, idle; best of 1"
    rollout = ReplicaView("rollout-0", 4, tuple(worker(n, "filling", done=n, chunks=64) for n in range(4)), None)
    reads = tuple(transfer(n, n, target="rollout-0", source="trainer", reason=reason, **READING) for n in range(4))
    return job(rollout, ReplicaView("trainer", 2, (worker(0), worker(1)), None), reads=reads, versions=(V7,))


def lost() -> Status:
    """Version 8 died with its trainer; a rollout still holds 7."""
    gone = VersionView(8, False, True, (), (), last_holder="policy/trainer[0]", is_lost=True, age_s=3.0)
    waits = "version 8 of policy is lost: no worker holds shard 0; policy/trainer[0] held it last"
    called = CallView(3, "replicate", 8, None, "waiting", waits, 6.0)
    replicas = (ReplicaView("rollout-0", 1, (worker(0),), None), ReplicaView("rollout-1", 1, (worker(0),), called))
    return job(*replicas, versions=(gone, replace(V7, holders=("rollout-0", "rollout-1"))))


LONG = "qwen3-235b-a22b-grpo-2026-11-28-seed17/rollout-0017-of-0128-"
JOBS: dict[str, Callable[[], Status]] = {
    "small": small,
    "long names": lambda: small(LONG),
    "2,000 workers": large,
    "several models": several,
    "cross-site": cross_site,
    "across layouts": across,
    "stalled read": stalled,
    "lost version": lost,
}
WIDTHS = (60, 70, 80, 100, 130, 160, 250)
UNIT = r"(B|[KMGTP]iB|s|min|h|d)\b"


@pytest.mark.parametrize("name", JOBS)
def test_it_is_one_screen_at_every_width(name: str) -> None:
    status = JOBS[name]()
    for width in WIDTHS:
        lines = lines_of(status, width, most_lines=SCREEN_LINES)
        assert len(lines) <= SCREEN_LINES, width
        assert max(map(cell_len, lines)) <= width
        assert not [line for line in lines if 0 < len(line.strip()) < 4], "no text is one letter a line"
        assert not [line for line in lines if re.match(UNIT, line.strip())], "no unit is cut from its number"
        cut = [a for a, b in pairwise(lines) if re.search(r"\d$", a) and re.match(UNIT, b.strip())]
        assert not cut, width
        assert lines[0].startswith("reference server")
        assert next(n for n, line in enumerate(lines) if "replica " in line) <= 16, "the summary comes first"
        if name not in ("2,000 workers", "several models"):
            assert "--all" not in words("\n".join(lines)), f"{width}: a small job is shown whole"


def test_2_000_workers_are_counts_and_the_slowest_ones() -> None:
    status = large()
    text = words(drawn(status, 80, most_lines=SCREEN_LINES))
    assert "250 replicas of 2,000 workers: 1,336 holding 7, 400 filling 7, 224 holding 6, 40 silent" in text
    assert "not heard for" in text
    assert re.search(r"and 2\d\d more replicas: --all, --replica, --filter", text)
    assert len(lines_of(status, 80)) > 250


def test_the_slowest_come_first() -> None:
    lines = lines_of(small(), 80)
    names = [found[1] for line in lines if (found := re.match(r"  (rollout-\d|trainer)\b.* \d ", line))]
    assert names[:4] == ["rollout-2", "rollout-1", "rollout-3", "rollout-4"], "stopped, reads, 2 behind, 1 behind"


def test_each_version_says_how_far_its_holders_are_behind() -> None:
    text = words(drawn(small(), 80))
    assert "version 7, 34 s old, held by trainer, rollout-0; filling rollout-1" in text
    assert "version 6, 1 min 35 s old, held by rollout-2 (silent): 1 version behind for 34 s" in text
    assert "version 5, 2 min 36 s old, held by rollout-3: 2 versions behind for 1 min 35 s" in text
    assert "rollout-3 5 holding 2, 1 min 0.4 s" in text, "the same in columns, and when it was last heard"
    gone = replace(small().models[0], versions=(V7, replace(V6, holders=(), host_copies=(), is_lost=True), V5))
    text = words(drawn(replace(small(), models=(gone,)), 80))
    assert "held by rollout-3: 2 versions behind for 1 min 35 s" in text, "6 was published, though it is let go by now"
    assert "version 6" not in text
    restarted = small()
    unknown = tuple(replace(each, age_s=None) for each in restarted.models[0].versions)
    text = words(drawn(replace(restarted, models=(replace(restarted.models[0], versions=unknown),)), 80))
    assert "version 6, held by rollout-2 (silent): 1 version behind;" in text


def test_a_frozen_rollout_is_not_shown_as_if_it_held_a_version() -> None:
    row = next(line for line in lines_of(small(), 160) if line.startswith("  rollout-2 "))
    assert "6 silent" in row
    assert "holding" not in row
    assert "not heard for 9.1 s: its process may be stopped; 0.9 s of its lease left" in row


def test_a_worker_that_is_not_heard_says_so_once() -> None:
    waits = "it was not heard for 9.1 s"
    called = CallView(9, "update", "latest", 7, "running", waits, 12.0)
    stopped = worker(0, "withdrawing", 6, is_silent=True, heard_s=9.1, waiting_for=waits)
    text = words(drawn(job(ReplicaView("rollout-2", 1, (stopped,), called)), 200))
    assert text.count("not heard for 9.1 s") == 1
    assert 'update("latest") is 7, running for 12 s' in text


def test_a_read_that_stands_still_says_for_how_long_and_why() -> None:
    text = words(drawn(stalled(), 80))
    assert 'update("latest") is 7, running for 12 s' in text
    why = "nothing for 9.4 s: rollout-1 was not heard for 9.4 s"
    assert f"at 0 B/s; {why}; relay, full" in text
    assert text.count("rollout-1 was not heard") == 1


def test_a_shard_says_what_it_waits_for_and_a_closing_worker_too() -> None:
    waits = "it has the last copy of version 7, which must be kept, until there is one in another worker"
    closing = ReplicaView("rollout-1", 1, (worker(0, waiting_for=waits, waits_s=31.0),), None)
    assert f"close(), for 31 s: {waits}" in words(drawn(job(closing), UNFOLDED))
    called = CallView(5, "update", "latest", 7, "running", "shard 0: it has yet to begin", 4.0)
    shards = (worker(0, waiting_for="it has yet to begin"), worker(1, waiting_for="it has yet to stop"))
    text = words(drawn(job(ReplicaView("rollout-1", 2, shards, called)), UNFOLDED))
    assert 'update("latest") is 7, running for 4.0 s: shard 0: it has yet to begin' in text
    assert text.count("it has yet to begin") == text.count("it has yet to stop") == 1


def test_a_filter_shows_some_replicas_and_counts_these_alone() -> None:
    status = large()
    some = only(status, replica="rollout-000?")
    assert [each.name for each in some.models[0].replicas] == [f"rollout-000{n}" for n in range(10)]
    assert {each.target for each in some.transfers} == {"rollout-0000", "rollout-0005"}
    assert "10 replicas of 80 workers" in drawn(some, 80)
    silent = only(status, word="SILENT")
    assert [each.name for each in silent.models[0].replicas][:2] == ["rollout-0001", "rollout-0051"]
    assert not only(status, word="no such word").models[0].replicas
    assert only(status) == status


@pytest.mark.parametrize("width", [80, 160])
def test_it_says_who_holds_what(width: int) -> None:
    text = drawn(busy(), width)
    assert "reference server 127.0.0.1:7450, up 3 min 12 s, 7 workers, 2 reads open" in text
    assert "policy  latest is 7, 2 shards, 512.0 MiB" in text
    assert "version 7, held by rollout-1, trainer; filling rollout-2" in text
    assert "version 6" not in text, "an old one that was let go is no news"
    for fact in ("7 holding", "7 filling 50%", "7 cut off", "poisoned", "missing", "(spot)", "3.2 s of its lease left"):
        assert fact in words(text), fact


def test_a_read_from_a_host_copy_is_none_from_the_tensors() -> None:
    status = busy()
    copied = replace(status, transfers=tuple(replace(each, from_host=True) for each in status.transfers))
    assert "reads from rollout-1's host copy for 0.0 s" in words(drawn(copied, UNFOLDED))


def test_it_says_who_reads_from_whom_and_why() -> None:
    text = words(drawn(busy(), UNFOLDED))
    assert 'update("latest") is 7, waiting for 0.0 s: shard 1 has not arrived' in text
    assert "reads from rollout-1 for 0.0 s, 128.0 MiB of 256.0 MiB: relay, full, idle, same host" in text
    assert "stops reading from trainer" in text
    assert "replicate(7), failed: shard 1 of rollout-3 died" in text
    assert text.count("update(") == 1, "a call that ended well is not news"


def test_it_says_that_an_update_has_kept_what_was_held() -> None:
    call = CallView(5, "update", "latest", 7, "finished", "r keeps version 7: no source of version 8 of m has answered")
    model = ModelView("m", 1, 8, 1024, (), (ReplicaView("r", 1, (worker(0),), call),))
    text = words(drawn(Status("1", 1.0, 0.0, (model,), (), {}), UNFOLDED))
    assert 'update("latest") is 7, finished: r keeps version 7: no source of version 8 of m has answered' in text


@pytest.mark.parametrize(("left", "says"), [(0, "no room"), (2, "0 B of 2.0 KiB")])
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
    assert text.count("\\x1b[2J") >= 6
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
    assert "version 7, held in host memory only; host copies: r version 6" in text, "its other shard has that copy"
    assert "version 6, held in host memory only; host copies: r (cut off), s" in text


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
    assert "version 6, held by r: 1 version behind; kept; pinned by r" in text
    assert "t (writer) 0 empty" in text


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
    watcher.ask()
    return words("\n".join(line.plain for line in watcher.draw(400)))


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
    assert "version 7, held by" in away
    assert "no answer" not in look(watcher)


def test_without_a_terminal_it_prints_one_below_the_other() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    watch(watcher_of([busy(), busy()]), console, every_s=0.01, times=2)
    assert out.getvalue().count("reference server") == 2


def test_keys_scroll_a_longer_page_and_its_last_line_says_where_it_is() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=20, force_terminal=False)
    longer = only(large(), replica="rollout-000?")
    watcher = watcher_of([longer, quiet()])
    watcher.ask()
    page = Page(watcher, console)

    def seen() -> list[str]:
        with console.capture() as capture:
            console.print(page.draw())
        return capture.get().splitlines()

    assert seen()[0].startswith("reference server")
    assert seen()[-1] == "lines 1 to 19; ↑ ↓ PgUp PgDn scroll, q ends"
    second, twentieth = seen()[1], lines_of(longer, 100)[19]
    assert page.press(DOWN)
    assert seen()[0] == second
    assert page.press(HOME)
    assert page.press(PAGE_DOWN)
    assert seen()[1] == twentieth.rstrip()
    assert page.press(END)
    assert seen()[-2] == lines_of(longer, 100)[-1].rstrip()
    watcher.ask()
    assert seen()[0].startswith("reference server"), "what fits is shown whole"
    assert not page.press(b"q")


def test_as_json_it_is_a_line_for_each_answer_of_the_server() -> None:
    said: list[str] = []
    watch_json(watcher_of([busy(), None, quiet()]), said.append, every_s=0.001, times=3)
    assert [msgspec.json.decode(line, type=Status) for line in said] == [busy(), quiet()]


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


def test_sizes_and_times() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 2**20 - 1: "1.0 MiB", 50 * 2**30: "50.0 GiB"}
    assert {size_bytes: size_text(size_bytes) for size_bytes in sizes} == sizes
    times = {
        0.04: "0.0 s",
        9.96: "10 s",
        59.7: "1 min 00 s",
        192.4: "3 min 12 s",
        3600: "1 h 00 min",
        90061: "1 d 01 h",
    }
    assert {seconds: time_text(seconds) for seconds in times} == times


def test_no_terminal_obeys_what_is_shown() -> None:
    for text in ("größer, 重み", "two\nlines"):
        assert plain_text(text) == text
    assert plain_text("\x1b[2Jgone\x1b]0;title\x07") == "\\x1b[2Jgone\\x1b]0;title\\x07"
    assert plain_text("back\rwards\t\u202e") == "back\\rwards\\t\\u202e"
