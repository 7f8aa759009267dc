"""How a caller names a version: an integer, "latest", or "latest-N" (the N-th before the latest).

And for `update`, or the choice that the update of a set begins with, "prefetched": the newest that all shards of the
replica have whole in their own host memory.
"""

import re

from .errors import UsageError
from .messages import Spec
from .names import Version

_LATEST = re.compile(r"latest(?:-(\d{1,9}))?\Z")
PREFETCHED = "prefetched"
HIGHEST_VERSION = 2**62  # fits every integer type on the way
MAX_FIRST_VERSION = 2**53  # JSON has it exactly; steps, samples, tokens and microseconds since 1970 are far below
MAX_VERSION_JUMP = 10**9  # a large step has 10**8 tokens, a day 86_400_000 ms; from 2**53 to 2**62 it takes 4.6e9 jumps


def parse_spec(spec: Spec, verb: str = "") -> Version | None:
    """The version that the spec of this verb names outright, or None if the server has to say. Raises `UsageError`."""
    if isinstance(spec, int) and not isinstance(spec, bool):
        if 0 <= spec <= HIGHEST_VERSION:
            return Version(spec)
        raise UsageError(f"version {spec} is out of range: versions are integers from 0 to 2**62")
    if isinstance(spec, str) and _LATEST.match(spec):
        return None
    if verb in ("update", "choose") and spec == PREFETCHED:
        return None
    if spec == PREFETCHED:
        raise UsageError(f"{spec!r} is for update() only", hint='use an integer, "latest" or "latest-N"')
    more = ', or for update() "prefetched"' if verb == "update" else ""
    raise UsageError(f"{spec!r} names no version", hint=f'use an integer, "latest" or "latest-N"{more}')


def steps_back(spec: str) -> int:
    """How far before the latest: 0 for "latest", N for "latest-N"."""
    found = _LATEST.match(spec)
    assert found is not None
    return int(found.group(1) or 0)


def call_text(verb: str, spec: Spec, claim: Version | None, *, waits: bool = False) -> str:
    """A call as its caller would write it. What a set's replicate or update begins with is no call of its own."""
    if verb == "choose":
        return f"replicate or update({spec!r}) on a set"
    if claim is not None:
        return f"mutating(version={claim})"
    return f"{verb}({spec!r}{', wait=True' if waits else ''})" if spec != "" else f"{verb}()"
