"""What the server's orders change at once. What they make possible is done by the steps that follow every event."""

from ..messages import Failure, Orders, Refusal
from . import calling, closing
from .state import WorkerState


def take(worker: WorkerState, orders: Orders) -> None:
    """Orders are the whole truth at their number: late or repeated ones are dropped."""
    if orders.number <= worker.seen or not worker.book.is_current(orders.acknowledged):
        return
    worker.seen, worker.session, worker.position = orders.number, orders.session, orders.position
    worker.has_heard = True
    worker.book.every_s, worker.patience_s = orders.report_s, orders.lease_s + orders.report_s
    sent_at = worker.book.acknowledge(orders.acknowledged)
    if sent_at is not None:
        worker.slot.extend_trust(sent_at + orders.trust_s)
    worker.slot.take_grant(orders.grant, orders.across)
    worker.copies.take_orders(orders, next_report=worker.next_report)
    worker.proofs.take_orders(orders, worker.versions_at_hand)
    worker.is_urgent |= orders.witness
    calling.take_conflict(worker, orders.conflict)
    call = worker.call
    if call is not None and call.take(orders.answer):
        worker.note(f"{call} is version {call.resolved}")
        worker.claimed_in = orders.number if call.claim is not None else worker.claimed_in
    is_answer = worker.memory.withdrawn_in <= orders.acknowledged
    if worker.memory.is_going(orders.drained) and is_answer and worker.copies.copying is None:
        worker.want(worker.memory.stop_serving())  # while a copy is made, this waits until the server says it again
    departure = worker.departure
    if departure is not None and 0 < departure.leaving_in <= orders.acknowledged:
        closing.leave(worker, departure, drained=True)


def take_refusal(worker: WorkerState, refusal: Refusal) -> None:
    """The server does not talk to this worker: for good, or for now."""
    worker.refusal = refusal
    if refusal.retry_s <= 0 and worker.call is not None:
        calling.fail(worker, Failure(refusal.code, refusal.message, refusal.hint))
