"""Bytes from a worker or a server become a message or a `Malformed`, and nothing else."""

import contextlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import (
    MAX_REPORT_BYTES,
    MAX_TEXT,
    PROTOCOL,
    Answer,
    CallReport,
    Failure,
    Filling,
    Grant,
    Hello,
    Holding,
    HostCopy,
    LayoutInfo,
    LayoutWanted,
    Orders,
    Poisoned,
    Reading,
    Refusal,
    Report,
    Source,
    TicketFailure,
    Withdrawing,
)
from tensorhub.protocol.names import NAME_RULE, Digest, Number, Ticket, Version, worker_id
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.config import check_name
from tensorhub.runtime.connection import Malformed, decode_to_server, decode_to_worker, encode
from tensorhub.server import Server

from .kit import hello

LAYOUT = LayoutInfo.of(Layout((TensorSpec("w", "bfloat16", (2, 3), (3, 1), 0, 12),), 12))
TO_SERVER = [
    hello(token="s3cret"),
    LAYOUT,
    Report(1),
    Report(2, buffer=Filling(Version(3), 1, 4), call=CallReport(5, "update", "latest-2")),
    Report(3, buffer=Holding(Version(3), Digest("ab"), True), call=CallReport(6, "publish", 7, Digest("cd"))),
    Report(4, buffer=Poisoned(), received_bytes={"trainer": 2**40}),
]
TO_WORKER = [
    Orders(Number(2**60), Number(1), 4, 10.0, 9.0, 1.0),
    Refusal("shard-taken", "another one lives", retry_s=0.5),
]


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda m: type(m).__name__)
def test_what_a_worker_says_arrives_as_it_was(message):
    assert decode_to_server(encode(message)) == message


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_what_the_server_says_arrives_as_it_was(message):
    assert decode_to_worker(encode(message)) == message


def test_random_frames_are_malformed():
    dice = random.Random(7)
    for _ in range(1_000):
        data = dice.randbytes(dice.randrange(200))
        for decode in (decode_to_server, decode_to_worker):
            with pytest.raises(Malformed):
                decode(data)


@given(st.sampled_from(TO_SERVER), st.integers(0, 400), st.integers(0, 255))
def test_a_bit_of_damage_gives_a_message_or_malformed(message, at, value):
    data = bytearray(encode(message))
    data[at % len(data)] = value
    with contextlib.suppress(Malformed):
        decode_to_server(bytes(data))


def test_deep_nesting_is_malformed_and_does_not_exhaust_the_stack():
    with pytest.raises(Malformed):
        decode_to_server(b"\x91" * 1_000_000)


def test_only_a_layout_may_be_long_and_only_of_somebody_known():
    many = tuple(TensorSpec(f"tensor.{i}", "float32", (1,), (1,), 4 * i, 4) for i in range(5_000))
    layout = encode(LayoutInfo.of(Layout(many, 20_000)))
    assert len(layout) > MAX_REPORT_BYTES
    assert isinstance(decode_to_server(layout), LayoutInfo)
    with pytest.raises(Malformed, match="first message"):
        decode_to_server(layout, is_known=False)
    report = encode(Report(1, received_bytes={f"replica-{i}": i for i in range(10_000)}))
    with pytest.raises(Malformed, match="at most"):
        decode_to_server(report)


def texts_of(value):
    """Where a text may stand in a decoded value: each of them as a path of field names, keys and places."""
    match value:
        case str():
            yield ()
        case dict():
            yield from (("key", key) for key in value if key == "trainer")  # the others are names of fields
            yield from ((key, *rest) for key, each in value.items() if key != "type" for rest in texts_of(each))
        case list():
            yield from ((at, *rest) for at, each in enumerate(value) for rest in texts_of(each))


def with_text(value, path, text):
    """The same value, with another text there."""
    if not path:
        return text
    if path[0] == "key":
        return {text if key == path[1] else key: each for key, each in value.items()}
    changed = value.copy()
    changed[path[0]] = with_text(value[path[0]], path[1:], text)
    return changed


ME = worker_id("m", "r", 0)
FAILURE = Failure("corrupt-transfer", "why", "what to do")
GRANT = Grant(Ticket(3), Version(1), (Source(ME, False, ("tcp://h:1",), Digest("ab")),), "the nearest")
WORDY = [  # each kind of message with a text in each place that has one
    replace(hello(token="t"), endpoints=("tcp://h:1",), site="s", host="h", place="p", metrics="h:2"),
    Report(
        1,
        buffer=Holding(Version(3), Digest("ab")),
        layout=Digest("l"),
        call=CallReport(5, "update", "latest", root=Digest("r"), metadata=Digest("m"), grid=Digest("g")),
        reading=Reading(
            *(Ticket(1), (Source(ME),), Version(1)),
            root=Digest("r"),
            transport="tcp",
            path="4 streams",
            why="not on one host",
        ),
        failures=(TicketFailure(Ticket(1), ME, "source-lost", "it fell silent"),),
        received_bytes={"trainer": 7},
        copies=(HostCopy(1, Version(1), Digest("r"), layout=Digest("l")),),
        copy_error=FAILURE,
        prefetch="latest",
        missed=FAILURE,
    ),
    Orders(
        *(Number(2), Number(1), 4, 10.0, 9.0, 1.0),
        answer=Answer(1, error=FAILURE, waiting=FAILURE),
        grant=GRANT,
    ),
    Refusal("shard-taken", "another one lives", "give it another name"),
    LayoutWanted(Digest("l")),
]
UNFIT = {"ESC": "\x1b[2J", "OSC": "\x1b]0;x\x07", "lines": "a\nb", "DEL": "a\x7f", "bidi": "a\u202eb", "C1": "\x9b2J"}
UNFIT |= {"zero width": "a\u200bb", "long": "x" * 5_000}


@pytest.mark.parametrize("text", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("message", WORDY, ids=lambda m: type(m).__name__)
def test_no_text_of_any_message_can_reach_a_terminal_raw(message, text):
    """In either direction, wherever it stands; and no error for it shows it raw."""
    decode = decode_to_server if isinstance(message, Hello | Report) else decode_to_worker
    assert decode(encode(message)) == message
    told = msgspec.msgpack.decode(encode(message))
    places = list(texts_of(told))
    assert len(places) >= sum(isinstance(getattr(message, name), str) for name in message.__struct_fields__)
    for path in [*places, ("type",)]:
        with pytest.raises(Malformed) as raised:
            decode(msgspec.msgpack.encode(with_text(told, path, text)))
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 4_100


def test_words_in_any_language_pass():
    said = Refusal("shard-taken", 'größer, 重み, \U0001f600, "a\\b"', "x" * 2_000)
    assert decode_to_worker(encode(said)) == said


def test_errors_travel_as_one_printable_line():
    """The sender sees to it, so that its peer takes the message."""
    failure = Failure("error", "\x1b[2J first\nsecond\u202e" + "x" * 5_000, "look\x07").bounded()
    orders = replace(TO_WORKER[0], answer=Answer(1, error=failure))
    assert decode_to_worker(encode(orders)) == orders
    assert failure.message.startswith("\\x1b[2J first\\nsecond\\u202e")


@pytest.mark.parametrize("name", ["", "a b", "a/b", ".a", "größer", "x" * 201, "a\n", "-a"])
def test_server_and_client_take_the_same_names(name):
    with pytest.raises(UsageError):
        check_name(name, "model")
    server = Server(settings=Settings(), now=0.0, first_number=1, fresh=True)
    for words in ({"model": name}, {"replica": name}):
        ((_, refusal),) = server.handle(hello(**words), sender="line", now=0.0)
        assert (refusal.code, refusal.hint) == ("usage", NAME_RULE)


def test_a_message_for_the_other_side_is_malformed():
    with pytest.raises(Malformed):
        decode_to_server(encode(TO_WORKER[0]))
    with pytest.raises(Malformed):
        decode_to_worker(encode(TO_SERVER[0]))


def test_a_newer_peer_may_say_more():
    more = msgspec.msgpack.decode(encode(Report(1))) | {"of_a_later_release": [1, 2]}
    assert decode_to_server(msgspec.msgpack.encode(more)) == Report(1)


# --- messages without sense -------------------------------------------------------------------------------------------


NONSENSE = {
    "a negative number": Report(-1),
    "a huge number": Report(2**63 - 1),
    "a negative version held": Report(1, buffer=Holding(-1, "ab")),
    "a huge version withdrawn": Report(1, buffer=Withdrawing(2**63, "ab")),
    "negative progress": Report(1, buffer=Filling(1, -1, 2)),
    "negative bytes": Report(1, received_bytes={"t": -1}),
    "a verb of another world": Report(1, call=CallReport(1, "destroy", "latest")),
    "a spec that names nothing": Report(1, call=CallReport(1, "update", "newest")),
    "publish of no number": Report(1, call=CallReport(1, "publish", "latest")),
    "publish of a negative number": Report(1, call=CallReport(1, "publish", -3)),
    "unpublish of a version": Report(1, call=CallReport(1, "unpublish", "latest")),
    "a claim that is no unpublish's": Report(1, call=CallReport(1, "update", "latest", claim=3)),
    "a negative claim": Report(1, call=CallReport(1, "unpublish", "", claim=-3)),
    "a huge lease": Report(1, writes=2**63),
    "a negative position": Report(1, call=CallReport(-1, "update", "latest")),
    "a read of a negative shard": Report(1, reading=Reading(5, (Source(worker_id("m", "t", -1)),), 1)),
    "a read of negative bytes": Report(1, reading=Reading(5, (Source(ME),), 1, arrived_bytes=-1)),
    "a read from nowhere": Report(1, reading=Reading(5, (), 1)),
    "bytes of a huge version": Report(1, cross_site_bytes={2**63 - 1: 1}),
    "a huge epoch": Report(1, buffer=Holding(Version(1), Digest("r"), epoch=2**63 - 1)),
    "a long story": Report(1, failures=(TicketFailure(1, worker_id("m", "t", 0), "x", "y" * (MAX_TEXT + 1)),)),
    "many failures": Report(1, failures=(TicketFailure(1, worker_id("m", "t", 0), "x", "y"),) * 5),
    "many endpoints": Hello(PROTOCOL, "m", "r", 0, 1, "life", endpoints=("tcp://x:1",) * 100),
    "a long life": Hello(PROTOCOL, "m", "r", 0, 1, "life" * 1000),
    "a call that there is none of": Report(1, call=CallReport(1, "choose", "latest")),
    "a huge floor": Report(1, call=CallReport(1, "update", "latest", floor=2**63)),
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
def test_what_no_worker_could_mean_is_malformed(message):
    with pytest.raises(Malformed):
        decode_to_server(encode(message))
