"""Of requests that went wrong the log says each kind seldom, and how many were left out."""

import asyncio
import contextlib
import errno
import gc
import weakref
from types import SimpleNamespace

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from tensorhub.runtime import admission
from tensorhub.runtime.admission import EVERY_S, FAILED, MALFORMED, SHORTAGE, Seldom


@pytest.fixture
def said(monkeypatch, caplog):
    """`said(error, at)`: what the log says of it then; None: nothing."""
    logs = {"a": Seldom(), "b": Seldom()}

    def say(error, at, server="a"):
        monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: at))
        caplog.clear()
        logs[server].exception("request from %s", "x", exc_info=error)
        found = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
        assert len(found) <= 1
        return found[0] if found else None

    return say


def test_what_is_no_http_is_one_line_in_a_while(said):
    malformed = BadHttpMessage("no host")
    assert said(malformed, 1.0) == ("request from x: it is no HTTP (BadHttpMessage)", False)
    assert [said(malformed, 2.0 + number) for number in range(3)] == [None] * 3
    later = said(malformed, 1.0 + EVERY_S[MALFORMED])
    assert later == ("request from x: it is no HTTP (BadHttpMessage); 3 more like it since the last one said", False)
    assert said(malformed, 2.0 + 2 * EVERY_S[MALFORMED]) == ("request from x: it is no HTTP (BadHttpMessage)", False)


def test_a_defect_of_ours_keeps_its_traceback_beside_what_strangers_send(said):
    assert said(BadHttpMessage("no host"), 1.0) is not None
    assert said(KeyError("ours"), 1.0) == ("request from x", True)
    assert said(KeyError("ours"), 2.0) is None
    assert said(KeyError("ours"), 1.0 + EVERY_S[FAILED]) == (
        "request from x; 1 more like it since the last one said",
        True,
    )


def test_a_flood_of_connections_without_descriptors_is_one_line_in_a_while(caplog):
    seldom, loop = Seldom(), asyncio.new_event_loop()
    seldom.listen_to(loop)
    refused = OSError(errno.EMFILE, "Too many open files")
    with contextlib.closing(loop):
        for _ in range(1000):
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": refused})
    (line,) = caplog.records
    assert line.getMessage() == "socket.accept() out of system resource: [Errno 24] Too many open files"
    assert line.exc_info is None
    assert seldom._left_out[SHORTAGE] == 999


def test_two_servers_of_a_process_do_not_keep_each_other_quiet(said):
    for server in ("a", "b"):
        assert said(BadHttpMessage("no host"), 1.0, server) is not None
        assert said(KeyError("ours"), 1.0, server) is not None
    assert said(KeyError("ours"), 2.0, "a") is None
    assert said(KeyError("ours"), 1.0 + EVERY_S[FAILED], "b") == ("request from x", True), (
        "none of its own was left out"
    )


def test_what_is_no_fault_is_logged_as_it_is(caplog):
    seldom = Seldom()
    with caplog.at_level("DEBUG", "tensorhub"):
        for _ in range(2):
            seldom.debug("100 %% of %s", "x")
            seldom.debug("100 %")
    assert caplog.messages == ["100 % of x", "100 %"] * 2
    assert {record.filename for record in caplog.records} == {"test_requests.py"}


def test_a_log_that_nobody_has_any_more_leaves_nothing_behind():
    gone = weakref.ref(Seldom())
    gc.collect()
    assert gone() is None
    assert not admission._log.filters
