"""What others have sent, as values: each has its type, and each text in it is printable and no longer than its limit.

A text that came through here may be logged, raised and shown as it is: no terminal obeys it, and it is one line.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from .errors import printable, shortened

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
