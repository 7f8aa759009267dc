"""A chunk counts only inside the reader's own lease, and not after a stop."""

import numpy as np
import pytest

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.registration import register
from tensorhub.protocol.errors import SessionLost
from tensorhub.runtime.trust import Lease, TrustedSink

CHUNK = 64


@pytest.fixture
def read():
    """(what is to be read, a trusted sink for it, its fill, its lease, the clock's hand)."""
    source = register({"w": np.arange(64, dtype=np.uint8), "v": np.arange(100, dtype=np.uint8)})
    manifest = build_manifest(source, CHUNK)
    fill = FillSink(register({"w": np.zeros(64, np.uint8), "v": np.zeros(100, np.uint8)}), manifest.root())
    hand = [100.0]
    lease = Lease(clock=lambda: hand[0])
    lease.until = 110.0
    return source, manifest, TrustedSink(fill, lease), fill, lease, hand


def put(source, manifest, sink, chunk):
    start, stop = manifest.chunk_range(chunk)
    with source.stream.reading(start, stop) as theirs, sink.stream.writing(start, stop) as mine:
        data = b"".join(theirs)
        at = 0
        for view in mine:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes
        sink.accept(chunk, mine)
    sink.stored(chunk)


def test_inside_the_lease_chunks_count(read):
    source, manifest, sink, fill, _, _ = read
    assert list(sink.begin(manifest.encode())) == [0, 1, 2]
    for chunk in range(3):
        put(source, manifest, sink, chunk)
    assert fill.progress.is_complete


def test_at_the_end_of_the_lease_nothing_counts_any_more(read):
    source, manifest, sink, fill, lease, hand = read
    sink.begin(manifest.encode())
    put(source, manifest, sink, 0)
    hand[0] = 110.0
    with pytest.raises(SessionLost):
        put(source, manifest, sink, 1)
    assert fill.progress.prefix == 1
    lease.until = 120.0
    put(source, manifest, sink, 1)
    assert fill.progress.prefix == 2


def test_a_lease_that_ends_while_a_chunk_is_judged_takes_the_chunk_with_it(read, monkeypatch):
    source, manifest, sink, fill, _, hand = read
    sink.begin(manifest.encode())
    judge = fill.accept

    def slowly(chunk, views):
        judge(chunk, views)
        hand[0] = 200.0

    monkeypatch.setattr(fill, "accept", slowly)
    with pytest.raises(SessionLost):
        put(source, manifest, sink, 0)
    assert fill.progress.prefix == 0
    assert 0 in fill.begin(manifest.encode())


def test_after_a_stop_nothing_counts(read):
    source, manifest, sink, fill, _, _ = read
    sink.begin(manifest.encode())
    sink.stop_flag.set()
    with pytest.raises(SessionLost):
        put(source, manifest, sink, 0)
    with pytest.raises(SessionLost):
        sink.begin(manifest.encode())
    assert fill.progress.prefix == 0


def test_a_worker_that_never_heard_from_the_server_trusts_nothing():
    assert Lease().is_over
