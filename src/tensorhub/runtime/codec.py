"""Messages as bytes and back: MessagePack with a tag, never pickle, and a limit on everything.

What cannot be decoded, or is longer than its kind may be, is a `Malformed`; nothing else is ever raised for it.
"""

import msgspec

from ..core.messages import (
    MOST_LAYOUT_BYTES,
    MOST_REPORT_BYTES,
    Hello,
    LayoutInfo,
    Orders,
    Refusal,
    Report,
    ToServer,
    ToWorker,
)

_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(Hello | LayoutInfo | Report)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(Orders | Refusal)


class Malformed(Exception):
    """The bytes are no message of this protocol."""


def encode(message: ToServer | ToWorker) -> bytes:
    """The message as it travels."""
    return _encoder.encode(message)


def decode_to_server(data: bytes, *, is_known: bool = True) -> ToServer:
    """A message from a worker. A stranger (`is_known` false) may not make the server look at a long one."""
    if not is_known and len(data) > MOST_REPORT_BYTES:
        raise Malformed(f"a first message of {len(data)} B, where at most {MOST_REPORT_BYTES} B are due")
    try:
        message = _to_server.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error
    limit = MOST_LAYOUT_BYTES if isinstance(message, LayoutInfo) else MOST_REPORT_BYTES
    if len(data) > limit:
        raise Malformed(f"a {type(message).__name__} of {len(data)} B, where at most {limit} B are due")
    return message


def decode_to_worker(data: bytes) -> ToWorker:
    """A message from the server."""
    try:
        return _to_worker.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error
