"""Of requests that went wrong the log says each kind seldom, and how many were left out."""

import logging
from types import SimpleNamespace

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from tensorhub.runtime import requests
from tensorhub.runtime.requests import FAILED_EVERY_S, MALFORMED_EVERY_S, Seldom


@pytest.fixture
def said(monkeypatch):
    """`said(error, at)`: what the log says of it then; None: nothing."""
    seldom = Seldom()

    def say(error, at):
        monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: at))
        found = (type(error), error, None)
        record = logging.LogRecord("a", logging.ERROR, __file__, 0, "request from %s", ("x",), found)
        return (record.getMessage(), record.exc_info is not None) if seldom.filter(record) else None

    return say


def test_what_is_no_http_is_one_line_in_a_while(said):
    malformed = BadHttpMessage("no host")
    assert said(malformed, 1.0) == ("request from x: it is no HTTP (BadHttpMessage)", False)
    assert [said(malformed, 2.0 + number) for number in range(3)] == [None] * 3
    later = said(malformed, 1.0 + MALFORMED_EVERY_S)
    assert later == ("request from x: it is no HTTP (BadHttpMessage); 3 more like it since the last one said", False)
    assert said(malformed, 2.0 + 2 * MALFORMED_EVERY_S) == ("request from x: it is no HTTP (BadHttpMessage)", False)


def test_a_defect_of_ours_keeps_its_traceback_beside_what_strangers_send(said):
    assert said(BadHttpMessage("no host"), 1.0) is not None
    assert said(KeyError("ours"), 1.0) == ("request from x", True)
    assert said(KeyError("ours"), 2.0) is None
    assert said(KeyError("ours"), 1.0 + FAILED_EVERY_S) == (
        "request from x; 1 more like it since the last one said",
        True,
    )
