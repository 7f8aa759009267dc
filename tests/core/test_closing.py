"""Nobody counts on a worker that closes, though it is still here."""

from typing import Any

from tensorhub.protocol.messages import Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Version

from .kit import worker
from .town import Town

ONE, ROOT = Version(1), Digest("r")
TRAINER, CLOSER, OTHER = worker("trainer"), worker("closer"), worker("other")
PUBLISHED = Holding(ONE, ROOT, published=True)


def test_a_site_elects_nobody_who_closes() -> None:
    town = Town()
    for who in (CLOSER, OTHER):
        town.joins(who, site="b", may_be_elected=True, copies_left=1)
    town.says(CLOSER, copies_left=1, closing=True)
    town.joins(TRAINER, site="a", buffer=PUBLISHED)
    assert (town.orders[CLOSER].fetch, town.orders[OTHER].fetch) == (None, ONE)


def test_a_worker_that_closes_shares_no_host_copy() -> None:
    town = Town()
    town.joins(TRAINER, host="far", reliable=False, buffer=PUBLISHED)
    has: dict[str, Any] = {"copies": (HostCopy(1, ONE, ROOT, whole=True),)}
    town.joins(CLOSER, host="here", place="p", **has)
    town.joins(OTHER, host="here", place="p", copies_left=1)
    town.says(CLOSER, **has, closing=True)
    grant = town.orders[OTHER].grant
    assert grant is not None, "it is the heir"
    assert (grant.source.worker, grant.to_host, grant.shares) == (TRAINER, True, False)


def test_closing_workers_do_not_rely_on_each_other() -> None:
    """The only one that stays fetches the version first."""
    town, stays = Town(keep_established=False), worker("stays")
    town.joins(TRAINER, buffer=PUBLISHED)
    town.joins(stays, copies_left=1)
    town.says(TRAINER, buffer=Withdrawing(ONE, ROOT, published=True), closing=True)
    town.joins(CLOSER, buffer=Withdrawing(ONE, ROOT), closing=True)
    assert [town.orders[who].drained for who in (TRAINER, CLOSER)] == [None, None]
    assert town.orders[stays].fetch == ONE
    town.says(stays, copies=(HostCopy(1, ONE, ROOT, whole=True),))
    assert town.orders[CLOSER].drained == ONE


def test_a_reliable_worker_does_not_leave_its_version_to_a_spot_worker() -> None:
    town = Town(keep_established=False)
    town.joins(TRAINER, buffer=PUBLISHED)
    town.joins(OTHER, reliable=False, buffer=Holding(ONE, ROOT))
    town.says(TRAINER, buffer=Withdrawing(ONE, ROOT, published=True), copies_left=1)
    assert (town.orders[TRAINER].offload, town.orders[TRAINER].drained) == (ONE, None)


def test_a_closing_worker_waits_for_a_spot_worker_for_a_while_only() -> None:
    town = Town(spot_handover_s=5.0, lease_s=60.0)
    town.joins(TRAINER, buffer=PUBLISHED)
    town.joins(OTHER, reliable=False, copies_left=1)
    leaves = {"buffer": Withdrawing(ONE, ROOT, published=True), "closing": True}
    town.says(TRAINER, **leaves)
    assert (town.orders[TRAINER].drained, town.orders[OTHER].fetch) == (None, ONE)
    grant = town.orders[OTHER].grant
    assert grant is not None
    town.until(6.0)
    town.says(TRAINER, **leaves)
    town.says(OTHER, copies_left=1, closed=grant.ticket)
    assert town.orders[TRAINER].drained == ONE
