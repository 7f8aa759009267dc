"""Reads of pieces, over every transport: what comes is what plain indexing says, and nothing else is touched."""

from collections.abc import Sequence
from random import Random

import pytest

from tensorhub.reshard import copies
from tensorhub.reshard.exported import Cut
from tensorhub.transport.base import Transport
from tensorhub.transport.local import transport as local_pieces
from tensorhub.transport.nixl import transport as nixl_pieces

from . import kit
from .conftest import Make
from .pieces_kit import Columns, across_for, cuts_of, drawn, exported, on_device, read_all, sources_of, transposed

SEEDS = 15


@pytest.fixture(params=[False, True], ids=["", "fetched"])
def is_fetched(request: pytest.FixtureRequest, kind: kit.Kind, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a reader that can fetch fetches short runs as well, which it would rather be sent."""
    if request.param and ("tcp" in kind.name or kind.is_on_device):
        pytest.skip("only where a reader can fetch, and need not")
    if request.param:
        monkeypatch.setattr(local_pieces, "SENT_BELOW_BYTES", 0)
        monkeypatch.setattr(nixl_pieces, "SENT_BELOW_BYTES", 0)
    return bool(request.param)


def check_read(source: Transport, reader: Transport, drawn: Columns, cuts: Sequence[Cut], *, batch_bytes: int) -> None:
    """All that the reader wants comes, and nothing else of its memory is touched."""
    model, publisher, target, grid = drawn
    for number, (shard, cut) in enumerate(zip(publisher, cuts, strict=True)):
        exported(source, str(number), shard, cut)
    before = target.outside()
    sources = sources_of(cuts)
    across = across_for(target, grid, sources, batch_bytes=batch_bytes)
    read_all(across, sources, reader, [source.endpoint] * len(sources))
    assert not target.wrong(model)
    assert all((one == other).all() for one, other in zip(target.outside(), before, strict=True))
    for number in range(len(publisher)):
        assert source.withdraw(str(number), timeout_s=kit.DEADLINE_S)


@pytest.mark.usefixtures("is_fetched")
@pytest.mark.parametrize("is_known", [True, False], ids=["cut", "uncut"])
def test_any_layout_from_any_layout(make: Make, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = make(), make()
    for seed in range(SEEDS):
        chance = Random(seed)
        monkeypatch.setattr(copies, "SHORT_BYTES", (0, 12, 64)[seed % 3])  # what goes straight, and what is turned
        columns = drawn(chance, is_known=is_known)
        cuts = cuts_of(columns.publisher, columns.grid)
        check_read(source, reader, columns, cuts, batch_bytes=chance.choice((1, 100, 1 << 20)))


@pytest.mark.usefixtures("is_fetched")
@pytest.mark.parametrize("is_here", [True, False], ids=["here", "there"])
@pytest.mark.parametrize("shape", [(64, 64), (301, 77)], ids=str)
def test_what_lies_transposed_at_one_end(make: Make, shape: tuple[int, int], is_here: bool) -> None:
    columns = transposed(*shape, is_here=is_here)
    cuts = cuts_of(columns.publisher, columns.grid)
    across = across_for(columns.reader, columns.grid, sources_of(cuts))
    orders = [leg._order for leg in across.legs(sources_of(cuts))]
    is_turned = any(order.scatter.first_turn[-1] for order in orders)
    assert is_turned is not is_here, "for its digest what comes in another order is gone through in that of the tile"
    check_read(make(), make(), columns, cuts, batch_bytes=1 << 20)


@pytest.mark.parametrize("who", ["source", "reader", "both"])
def test_also_where_memory_must_be_entered_block_by_block(make: Make, kind: kit.Kind, who: str) -> None:
    """A device's: what is written between two runs would be what the staging ring happened to hold."""
    if kind.is_on_device:
        pytest.skip("there all of it is on a device")
    if "local" in kind.name and who != "reader":
        pytest.skip("what has no addresses is not served by this transport")
    if kind.name.startswith("nixl") and who != "reader":
        pytest.skip("a real NIXL cannot be told of a device that is none")
    source, reader = make(), make()
    for seed in range(SEEDS):
        chance = Random(seed)
        columns = drawn(chance, is_known=bool(seed % 2))
        _, publisher, target, grid = columns
        cuts = cuts_of(publisher, grid)
        if who != "reader":
            for shard in publisher:
                shard.registration = on_device(shard.registration)
        if who != "source":
            target.registration = on_device(target.registration)
        check_read(source, reader, columns, cuts, batch_bytes=chance.choice((1, 100, 1 << 20)))
