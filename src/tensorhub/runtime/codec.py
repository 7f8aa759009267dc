"""Messages as bytes and back: MessagePack with a tag, never pickle, and a limit on everything.

What cannot be decoded, is longer than its kind may be, or says what no worker could mean is a `Malformed`; nothing else
is ever raised for it. So the machine behind hears only what has a meaning, true or not.
"""

from collections.abc import Iterator

import msgspec

from ..protocol.errors import UsageError
from ..protocol.messages import (
    MAX_FAILURES,
    MAX_HINT,
    MAX_LAYOUT_BYTES,
    MAX_OVER,
    MAX_PARTS,
    MAX_REPORT_BYTES,
    MAX_TEXT,
    VERBS,
    Across,
    CallReport,
    Empty,
    Filling,
    Hello,
    LayoutInfo,
    LayoutWanted,
    Orders,
    Poisoned,
    Refusal,
    Report,
    Spec,
    ToServer,
    ToWorker,
    parse_spec,
)
from ..protocol.names import Undecodable, decoded

MAX_NUMBER = 2**62  # of anything counted: above every clock in microseconds, and twice it still fits 64 bits
MAX_ENDPOINTS = 16
MAX_WORD = 300  # characters of a host, a site
MAX_ENDPOINT = 2400  # characters of an endpoint: it may have several addresses

_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(Hello | LayoutInfo | Report)
_to_worker: msgspec.msgpack.Decoder[ToWorker | LayoutWanted] = msgspec.msgpack.Decoder(Orders | Refusal | LayoutWanted)


class Malformed(Exception):
    """The bytes are no message of this protocol."""


class OddNumber(Malformed):
    """A report that is well made but for a number. Its worker may come back: the next one may be right."""


def encode(message: ToServer | ToWorker | LayoutWanted) -> bytes:
    """The message as it travels."""
    return _encoder.encode(message)


def decode_to_server(data: bytes, *, is_known: bool = True) -> ToServer:
    """A message from a worker. A stranger (`is_known` false) may not make the server look at a long one."""
    if not is_known and len(data) > MAX_REPORT_BYTES:
        raise Malformed(f"a first message of {len(data)} B, where at most {MAX_REPORT_BYTES} B are due")
    try:
        message = decoded(_to_server, data)
    except Undecodable as error:
        raise Malformed(str(error)) from error
    limit = MAX_LAYOUT_BYTES if isinstance(message, LayoutInfo) else MAX_REPORT_BYTES
    if len(data) > limit:
        raise Malformed(f"a {type(message).__name__} of {len(data)} B, where at most {limit} B are due")
    if isinstance(message, Report) and not all(0 <= number <= MAX_NUMBER for number in _numbers_of(message)):
        raise OddNumber("a Report with a number out of range")
    wrong = _nonsense_of(message)
    if wrong:
        raise Malformed(f"a {type(message).__name__} with {wrong}")
    return message


def decode_to_worker(data: bytes) -> ToWorker | LayoutWanted:
    """A message from the server."""
    try:
        return decoded(_to_worker, data)
    except Undecodable as error:
        raise Malformed(str(error)) from error


def _nonsense_of(message: ToServer) -> str:
    """What in a message no worker could mean; empty where all is well."""
    match message:
        case Hello():
            words, endpoints = (message.life, message.site, message.host), message.endpoints
            if len(endpoints) > MAX_ENDPOINTS or any(len(each) > MAX_ENDPOINT for each in endpoints):
                return "too many or too long endpoints: how many addresses does its worker have?"
            if any(len(word) > MAX_WORD for word in words):
                return "too long words about its worker"
            return ""
        case Report():
            if len(message.failures) > MAX_FAILURES or any(
                len(f.message) > MAX_TEXT or len(f.hint) > MAX_HINT for f in message.failures
            ):
                return "too many or too long failures"
            reading = message.reading
            if reading is not None and len(reading.transport + reading.path + reading.why) > MAX_TEXT:
                return "too long words about its read"
            across = message.across
            if len(message.over) > MAX_OVER or (across is not None and _is_too_much(across)):
                return "too many parts of a read across"
            return _nonsense_of_wish(message.prefetch) or _nonsense_of_call(message.call)
    return ""


def _is_too_much(across: Across) -> bool:
    return len(across.parts) > MAX_PARTS or len(across.brought) > MAX_PARTS


def _nonsense_of_wish(prefetch: Spec | None) -> str:
    if prefetch is None:
        return ""
    try:
        parse_spec(prefetch)
    except UsageError as error:
        return f"a bad version to fetch ahead: {error}"
    return ""


def _nonsense_of_call(call: CallReport | None) -> str:
    if call is None:
        return ""
    if call.verb not in VERBS:
        return "a call that does not exist"
    if call.claim is not None and call.verb != "unpublish":
        return "a claim that no unpublish makes"
    if call.verb == "unpublish":
        return "" if call.spec == "" else "a version to unpublish"
    try:
        is_open = parse_spec(call.spec, call.verb) is None
    except UsageError as error:
        return f"a bad version: {error}"
    return "no version to publish" if call.verb == "publish" and is_open else ""


def _numbers_of(report: Report) -> Iterator[int]:
    yield from (report.number, report.session, report.seen, report.closed, report.ended, report.finished)
    yield from (report.size_bytes, report.newest or 0, report.claim or 0, *report.received_bytes.values())
    match report.buffer:
        case Empty() | Poisoned():
            pass
        case Filling(version=version, done=done, chunks=chunks):
            yield from (version, done, chunks)
        case _:
            yield report.buffer.version
    if report.call is not None:
        yield from (report.call.number, report.call.resolved or 0, report.call.claim or 0, report.call.floor or 0)
    if report.reading is not None:
        yield from (report.reading.ticket, report.reading.version, report.reading.source.shard)
        yield report.reading.rate_bytes_per_s
    if report.across is not None:
        yield from (report.across.version, *report.across.brought)
        for part in report.across.parts:
            yield from (part.ticket, part.source.shard, part.arrived_bytes)
    yield from (report.copies_left, *report.pins, *report.over)
    for copy in report.copies:
        yield from (copy.number, copy.version, copy.done, copy.chunks)
    for failure in report.failures:
        yield from (failure.ticket, failure.source.shard)
