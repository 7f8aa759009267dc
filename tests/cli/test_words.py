"""Numbers as people read them."""

import pytest

from tensorhub.cli.output import count_text, plain_text, shards_text, size_text, some_text, time_text


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


def test_shards() -> None:
    assert shards_text([3]) == "3"
    assert shards_text([4, 1, 0, 2]) == "0-2, 4"
    assert shards_text([]) == ""


def test_counts_and_names() -> None:
    assert count_text(1, "shard") == "1 shard"
    assert count_text(1000, "shard") == "1,000 shards"
    assert some_text(["a", "b"], 2) == "a, b"
    assert some_text(["a", "b", "c"], 2) == "a, b and 1 more"


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
