"""What the server has signed and a worker keeps for it: a server that starts anew believes nothing else it is told."""

from dataclasses import dataclass, field

from ..messages import Orders, Roster
from ..names import Number, Version


@dataclass
class Proofs:
    """The newest of each, for the next report."""

    newest: Version | None = None  # version of the model
    newest_receipt: str = ""
    ceiling: Number = Number(0)  # no server has ever given out a number above it
    ceiling_receipt: str = ""
    roster: Roster | None = None  # who lives
    receipts: dict[int, str] = field(default_factory=dict)  # by version of what is here: it is what was published

    def take_orders(self, orders: Orders, here: list[Version | None]) -> None:
        """The latest orders. `here`: the versions of which this worker has something, or is about to."""
        if orders.newest is not None:
            self.newest, self.newest_receipt = orders.newest, orders.newest_receipt
        if orders.ceiling > self.ceiling:
            self.ceiling, self.ceiling_receipt = orders.ceiling, orders.ceiling_receipt
        self.roster = orders.roster
        self.receipts = {**self.receipts_of(here), **orders.receipts}

    def receipts_of(self, here: list[Version | None]) -> dict[int, str]:
        """Those of what is here."""
        return {version: receipt for version, receipt in self.receipts.items() if version in here}
