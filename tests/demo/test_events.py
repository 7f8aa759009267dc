"""Event logs: what is written is read, whole lines only, also behind a process that was killed while writing."""

from pathlib import Path

from bench.demo.events import EventReader
from bench.demo.live import picture, sparkline
from bench.demo.logs import EventLog
from bench.demo.progress import Progress

from .story import STEPS, generated, good_run, published


def test_events_survive_the_way_through_a_file(tmp_path: Path) -> None:
    for event in good_run():
        with EventLog(tmp_path, event.process) as log:
            log.write(event)
    assert EventReader(tmp_path).new() == good_run()


def test_a_reader_follows_files_that_grow(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    with EventLog(tmp_path, "trainer") as trainer, EventLog(tmp_path, "rollout-0") as rollout:
        assert reader.new() == []
        rollout.write(generated(2.0, "rollout-0", 1))
        trainer.write(published(1.0, 1))
        assert reader.new() == [published(1.0, 1), generated(2.0, "rollout-0", 1)]
        assert reader.new() == []
        trainer.write(published(3.0, 2))
        assert reader.new() == [published(3.0, 2)]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    with EventLog(tmp_path, "trainer") as log:
        log.write(published(1.0, 1))
    path = tmp_path / "trainer.jsonl"
    line = path.read_bytes()
    path.write_bytes(line + line[:20])
    assert reader.new() == [published(1.0, 1)]
    path.write_bytes(line + line)
    assert reader.new() == [published(1.0, 1)]


def test_progress_is_what_the_events_say() -> None:
    progress = Progress(STEPS)
    assert (progress.version, progress.is_past(0.0), progress.has_joined("rollout-2")) == (-1, False, False)
    progress.take(good_run())
    assert progress.version == STEPS
    assert progress.is_past(1.0)
    assert progress.is_trained
    assert progress.has_joined("rollout-2")
    assert progress.rollouts["rollout-1"].state == "killed"
    assert progress.rollouts["rollout-2"].state == "has left"
    assert any("ServerUnreachable" in news for news in progress.news)


def test_the_picture_can_be_drawn_at_any_moment() -> None:
    progress = Progress(STEPS)
    picture(progress, 0.0)
    for event in good_run():
        progress.take([event])
        picture(progress, event.time)


def test_a_sparkline_fits_its_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 1000)) <= 60
