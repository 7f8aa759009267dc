"""What a publisher says of a version beside its tensors: a small JSON object that travels in each shard's manifest.

So it is under the root, verified as the content is, and as long as somebody has a version, its metadata is there. Equal
objects are equal bytes: keys in order, no spaces. It must never: guess what a value that is no JSON may have meant.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from math import isfinite

from .errors import UsageError
from .names import Digest

MAX_METADATA_BYTES = 16 * 1024  # hyperparameters, counters, hashes, paths; the manifest of a GiB takes 4 KiB
MAX_DEPTH = 32  # of objects and arrays inside each other

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def encode_metadata(metadata: object) -> bytes:
    """As it travels; nothing for an empty mapping. Raises `UsageError` naming what is no JSON, or the size."""
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is of type {type(metadata).__name__}: it has to be a mapping of strings to JSON")
    plain = {key: _json(value, f"metadata[{key!r}]", 1) for key, value in _checked(metadata, "metadata").items()}
    if not plain:
        return b""
    try:
        encoded = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError as error:  # half a surrogate pair, or a number of thousands of digits
        raise UsageError(f"metadata cannot be written as JSON: {error}") from error
    if len(encoded) > MAX_METADATA_BYTES:
        largest = max(plain, key=lambda key: len(json.dumps(plain[key])))
        text = f"metadata of {len(encoded)} B is over {MAX_METADATA_BYTES} B; its largest value is {largest!r}"
        raise UsageError(text, hint="publish where it is to be found, or register it as a tensor")
    return encoded


def decode_metadata(encoded: bytes) -> dict[str, Json]:
    """Anew each time, so that it is the caller's. Raises `UsageError` if it is no JSON object, or too long."""
    if not encoded:
        return {}
    if len(encoded) > MAX_METADATA_BYTES:
        raise UsageError(f"metadata of {len(encoded)} B is over {MAX_METADATA_BYTES} B")
    try:
        found = json.loads(encoded, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"malformed metadata: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"metadata of type {type(found).__name__}, where an object is wanted")
    return found


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is no JSON")


def digest_of_metadata(encoded: bytes) -> Digest:
    """By which shards compare theirs; empty where there is none."""
    return Digest(blake2b(encoded, digest_size=16).hexdigest() if encoded else "")


def _checked(value: Mapping[object, object], where: str) -> dict[str, object]:
    """Its items, the keys of which are texts."""
    found: dict[str, object] = {}
    for key, each in value.items():
        if not isinstance(key, str):
            raise UsageError(f"{where} has the key {key!r}: keys are strings")
        found[key] = each
    return found


def _json(value: object, where: str, depth: int) -> Json:
    """The value, if JSON can say it as it is."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{where} is more than {MAX_DEPTH} levels deep")
    match value:
        case None | bool() | str():
            return value
        case int() if type(value) is int:
            return value
        case float() if type(value) is float:
            if not isfinite(value):
                raise UsageError(f"{where} is {value}, which JSON cannot say")
            return value
        case list() | tuple():
            return [_json(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
        case Mapping():
            return {key: _json(each, f"{where}[{key!r}]", depth + 1) for key, each in _checked(value, where).items()}
        case _:
            hint = "of a tensor or numpy scalar: .item() or .tolist()"
            raise UsageError(f"{where} is of type {type(value).__name__}, which is no JSON value", hint=hint)
