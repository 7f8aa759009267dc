"""Which transport two workers take: a rule. Facts in, the ways to try in order and why not others out.

The reader decides. It takes its own order of transports, keeps what the source offers too, and leaves out what is known
not to work between the two: because the endpoint says so, or because it was tried. A way that is chosen carries why
each transport that stands before it in the reader's order is not used; so a fallback is never silent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# from device to device of one host; on one host nothing else beats local; then RDMA and NVLink; tcp always
PREFERENCE = ("cuda", "local", "nixl", "tcp")


@dataclass(frozen=True)
class Way:
    """An endpoint to read from. `why` says what speaks against the transports before it; empty: nothing was before."""

    scheme: str
    endpoint: str
    why: str


def scheme_of(endpoint: str) -> str:
    """The transport that an endpoint belongs to."""
    return endpoint.partition("://")[0]


def choose(
    offered: Sequence[str], here: Sequence[str], excluded: Mapping[str, str]
) -> tuple[tuple[Way, ...], tuple[str, ...]]:
    """The ways to try, best first, and in words why there are no others.

    `offered` are the source's endpoints; `here` the reader's transports, best first; `excluded` says of endpoints why
    they do not work for this reader.
    """
    ways: list[Way] = []
    reasons: list[str] = []
    for scheme in here:
        endpoints = [endpoint for endpoint in offered if scheme_of(endpoint) == scheme]
        if not endpoints:
            reasons.append(f"{scheme}: the source does not offer it")
        for endpoint in endpoints:
            if endpoint in excluded:
                reasons.append(f"{scheme}: {excluded[endpoint]}")
            else:
                ways.append(Way(scheme, endpoint, "; ".join(reasons)))
    strangers = dict.fromkeys(scheme_of(endpoint) for endpoint in offered if scheme_of(endpoint) not in here)
    reasons += [f"{scheme}: this worker does not have it" for scheme in strangers]
    return tuple(ways), tuple(reasons)
