"""Identifiers that server and workers share, and safe decoding of what a peer sent.

A *worker* is one process with one shard of one model; its name is (model, replica, shard). Numbers (sessions, tickets,
orders) all come from one counter of the reference server, which only rises, over its restarts too.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, NewType, TypeVar

import msgspec

from .errors import printable, shortened

ModelName = NewType("ModelName", str)
ReplicaName = NewType("ReplicaName", str)
Shard = NewType("Shard", int)
Version = NewType("Version", int)
Number = NewType("Number", int)  # 0 is "none yet"; every other one was handed out by a reference server
Ticket = NewType("Ticket", int)
Digest = NewType("Digest", str)


MAX_NAME = 200  # characters of a model's or replica's name
NAME_RULE = f"use 1 to {MAX_NAME} letters, digits and . _ + = : -, not beginning with a sign"
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._+=:-]{{0,{MAX_NAME - 1}}}\Z")


def is_name(text: str) -> bool:
    """A model or a replica may be called so."""
    return _NAME.match(text) is not None


def plain(text: str) -> str:
    """As nothing but a text: one of a class derived from `str` (numpy.str_, an enum's) does not travel."""
    return str.__str__(text)


def plain_number(value: object) -> object:
    """A number of numpy's or torch's, also as an array of no dimension, as Python's own; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


class WorkerId(NamedTuple):
    """One shard of one replica of one model. Sorts by name, which is how every tie is broken."""

    model: ModelName
    replica: ReplicaName
    shard: Shard

    def __str__(self) -> str:
        return f"{self.model}/{self.replica}[{self.shard}]"


def worker_id(model: str, replica: str, shard: int) -> WorkerId:
    """A `WorkerId` from plain values."""
    return WorkerId(ModelName(model), ReplicaName(replica), Shard(shard))


# --- what a digest says of itself -------------------------------------------------------------------------------------

BOXED = "boxed-"  # how the digest of a layout begins that says which parts of which global tensors it has
PARTIAL = BOXED + "part-"  # the same of one that leaves out some of the model, and says so
TILED = "tiled-"  # how the root of a content begins that has a digest for each tile: it can be read into other layouts


def is_boxed(layout: Digest) -> bool:
    """True if the tensors of that layout do not depend on the shard's number."""
    return layout.startswith(BOXED)


def is_partial(layout: Digest) -> bool:
    """True if the layout may leave out some of a version."""
    return layout.startswith(PARTIAL)


def is_tiled(root: Digest) -> bool:
    """The content can be read into any layout of the same global tensors."""
    return root.startswith(TILED)


# --- what a peer has sent ---------------------------------------------------------------------------------------------
#
# Each value has its type, and each text in it is one printable line within its limit: it may be logged and shown.


MAX_TEXT = 4_000  # characters of one text: a worker of many addresses takes 2,400 to name them

T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]

_to_json = msgspec.json.Encoder().encode


class Undecodable(Exception):
    """Bytes that have no meaning here, or a text in them that may not be shown."""


def decoded(decoder: Decoder[T], data: bytes | bytearray | memoryview | msgspec.Raw) -> T:
    """The value. Raises `Undecodable`, whose text may be shown."""
    try:
        value = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(shortened(str(error), MAX_TEXT)) from error
    check_texts(value)
    return value


def check_texts(value: object) -> None:
    """Raises `Undecodable` for a text in a decoded value that may not be shown.

    A report of 700 B takes 1 µs: JSON escapes all that is unprintable in ASCII but for one character.
    """
    told = _to_json(value)
    is_plain = told.isascii() and b"\\" not in told and b"\x7f" not in told
    if not is_plain or (len(told) > MAX_TEXT and max(map(len, told.split(b'"')[1::2]), default=0) > MAX_TEXT):
        for text in _texts_in(value):
            check_text(text)


def check_text(text: str) -> None:
    """Raises `Undecodable` if the text may not be shown."""
    if len(text) > MAX_TEXT:
        raise Undecodable(f"a text of {len(text)} characters, where {MAX_TEXT} are the limit")
    if not text.isprintable():
        raise Undecodable(f"a text with unprintable characters: {printable(text)[:60]}")


def _texts_in(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from _texts_in(getattr(value, name))
        case dict():
            for key, each in value.items():
                yield from _texts_in(key)
                yield from _texts_in(each)
        case tuple() | list():
            for each in value:
                yield from _texts_in(each)
