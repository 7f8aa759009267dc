"""The demo with a large model, here with a small one: versions over loopback, a source that is killed, and its page."""

from pathlib import Path

import msgspec
import pytest

from bench.demo.large import LargeOptions, run_large
from bench.demo.large_summary import UNDISTURBED, Fetch, Large, Round, judge, kill_of
from bench.demo.report import write_report
from tensorhub.protocol.errors import UsageError

from .story import good_run
from .test_checks import summary_of

MIB = 1 << 20
SIZE_BYTES = 64 * MIB  # smaller ones have come before a source can be killed, and it takes more versions
replace = msgspec.structs.replace


@pytest.mark.long
@pytest.mark.processes
def test_readers_of_a_killed_source_get_the_right_bytes_and_a_page_says_so(tmp_path: Path) -> None:
    write_report(tmp_path, summary_of(good_run()), [], good_run())
    run_large(LargeOptions(size_mib=SIZE_BYTES // MIB, rollouts=3, out=tmp_path))
    large = msgspec.convert(msgspec.json.decode((tmp_path / "large.json").read_bytes())["run"], Large)
    assert failing(large) - {"rollouts read"} == set(), "how much they read from each other depends on the machine"
    kill = large.kill
    assert kill is not None
    assert large.rounds[-2].version == kill.version > UNDISTURBED
    assert all(0 < each.pause_s < each.seconds for each in kill.disturbed if each.is_reader)
    for one in large.rounds:
        assert one.sent_bytes > SIZE_BYTES / 2, "chunks count once they are sent, which may be after they have come"
        assert all(sum(fetch.bytes_by_source.values()) >= SIZE_BYTES for fetch in one.fetches)
    page = (tmp_path / "large.html").read_text(encoding="utf-8")
    assert f"{kill.rollout} was killed (SIGKILL) {kill.at_s:.2f} s after" in page
    for one in large.rounds:
        assert f"<td>{one.version}</td><td>{len(one.fetches)}</td><td>{one.seconds:.2f}</td>" in page
    assert 'href="report.html"' in page
    assert 'href="large.html"' in (tmp_path / "report.html").read_text(encoding="utf-8")


def failing(large: Large) -> set[str]:
    return {" ".join(check.sentence.split()[:2]) for check in judge(large) if not check.holds}


def fetch(rollout: str, source: str) -> Fetch:
    curve = [(0.1, source, SIZE_BYTES // 2), (0.4, "trainer", SIZE_BYTES // 2)]
    return Fetch(rollout, 0.0, 0.5, {source: SIZE_BYTES // 2, "trainer": SIZE_BYTES // 2}, curve, is_right=True)


def good() -> Large:
    """In the last version but one rollout-2 is killed while rollout-1 has half of the model from it."""
    fetches = [fetch("rollout-0", "rollout-1"), fetch("rollout-1", "rollout-2"), fetch("rollout-2", "rollout-1")]
    rounds = [Round(version, 0.1, SIZE_BYTES, fetches, 0) for version in range(1, UNDISTURBED + 1)]
    rounds += [Round(UNDISTURBED + more, 0.1, SIZE_BYTES, fetches[:2], 0) for more in (1, 2)]
    return Large(SIZE_BYTES, 3, 9.0, rounds, kill_of("rollout-2", 0.2, {"rollout-1": 0.5}, rounds[:-1]))


def test_what_is_missing_in_it_is_seen() -> None:
    large = good()
    assert failing(large) == set()
    assert large.kill is not None
    (lost,) = (each for each in large.kill.disturbed if each.is_reader)
    assert (lost.rollout, lost.share, lost.longer_s) == ("rollout-1", 0.5, 0.0)
    assert lost.pause_s == pytest.approx(0.2)
    wrong = [replace(each, is_right=each.rollout != "rollout-1") for each in large.rounds[-2].fetches]
    rounds = [*large.rounds[:-2], replace(large.rounds[-2], fetches=wrong), large.rounds[-1]]
    assert failing(replace(large, rounds=rounds)) == {"every rollout", "a rollout"}
    assert failing(replace(large, rounds=large.rounds[:-1])) == {"the others"}
    assert failing(replace(large, kill=None)) == {"a rollout"}
    assert failing(replace(large, kill=replace(large.kill, disturbed=[]))) == {"a rollout"}
    greedy = [replace(one, sent_bytes=2 * SIZE_BYTES) for one in large.rounds]
    assert failing(replace(large, rounds=greedy)) == {"rollouts read"}


@pytest.mark.parametrize(
    ("options", "words"),
    [(LargeOptions(rollouts=2), "at least 3 rollouts"), (LargeOptions(size_mib=1 << 30), "of memory")],
)
def test_what_cannot_be_run_is_refused(options: LargeOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_large(options)
