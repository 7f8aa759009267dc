"""Receipts: what a reference server has said, in a form that a later life of it recognises.

The server remembers nothing over a restart; the workers tell it. Most of what they tell needs no proof. Four things do:
which content a version number stands for where two workers differ, who has published it and whether it was established;
how high version numbers have come; how high the server's own numbers have come; and who else lives. For these a worker
carries the server's receipt: a keyed hash (BLAKE2b, RFC 7693). The key is random, only the server knows it, and it
outlives the process. A worker without a receipt is believed as long as no worker with a receipt contradicts it.
"""

import hmac
from hashlib import blake2b

from ..names import Digest, ModelName, Number, Shard, Version, WorkerId

MAX_REMEMBERED = 4096  # receipts for content: a version of a few thousand shards
ESTABLISHED = "+"  # what such a receipt begins with
SIZE = 12  # bytes: 96 bits, nobody guesses them in a fleet's life


class Notary:
    """Signs: each method says what its receipt states."""

    def __init__(self, key: bytes = b"") -> None:
        """`key`: the same for all lives of one cluster's server; any length."""
        self._key = blake2b(key, digest_size=32, person=b"tensorhub").digest()
        self._contents: dict[tuple[object, ...], str] = {}  # all replicas have the same ones
        self._newest: dict[ModelName, tuple[Version, str]] = {}  # all orders carry the same one for a while

    def content(
        self,
        model: ModelName,
        version: Version,
        shard: Shard,
        root: Digest,
        publisher: str = "",
        *,
        is_established: bool = False,
    ) -> str:
        """This is what that shard of the version was published as, by all shards of a replica: of that one, if known.

        `is_established`: and the version was established. The receipt says that in plain (`says_established`) and
        names the publisher (`publisher_in`).
        """
        what = is_established, publisher, model, version, shard, root
        receipt = self._contents.get(what)
        if receipt is None:
            if len(self._contents) >= MAX_REMEMBERED:
                self._contents.clear()
            purpose, mark = ("established", ESTABLISHED) if is_established else ("content", "")
            signed = self._sign(purpose, model, version, shard, root, *([publisher] if publisher else []))
            receipt = self._contents[what] = f"{mark}{signed}:{publisher}" if publisher else f"{mark}{signed}"
        return receipt

    def newest(self, model: ModelName, version: Version) -> str:
        """A version of that number has existed."""
        made_for, receipt = self._newest.get(model, (None, ""))
        if made_for != version:
            receipt = self._sign("newest", model, version)
            self._newest[model] = (version, receipt)
        return receipt

    def forget(self, model: ModelName) -> None:
        """Nothing is said of the model any more."""
        self._newest.pop(model, None)

    def ceiling(self, number: Number) -> str:
        """No number above this one was ever given out."""
        return self._sign("ceiling", number)

    def roster(self, model: ModelName, number: Number, count: int, digest: str) -> str:
        """So many sessions of the model live, with that sum."""
        return self._sign("roster", model, number, count, digest)

    def session(self, worker: WorkerId, session: Number) -> int:
        """What one session adds to that sum."""
        return int(self._sign("session", *worker, session), 16)

    def _sign(self, *parts: object) -> str:
        text = "\0".join(map(str, parts)).encode()
        return blake2b(text, key=self._key, digest_size=SIZE).hexdigest()


def publisher_in(receipt: str) -> str:
    """The replica that a receipt for content names as its publisher; empty if it names none. To be verified."""
    return receipt.partition(":")[2]


def says_established(receipt: str) -> bool:
    """The receipt for content says that its version was established. To be verified."""
    return receipt.startswith(ESTABLISHED)


def are_equal(one: str, other: str) -> bool:
    """Compare them in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
