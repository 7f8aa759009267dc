"""Two processes that say they are the same shard: the one who lives keeps its place."""

from tensorhub.protocol.messages import Refusal
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server

from .kit import hello, report, worker

SETTINGS = Settings(lease_s=10.0, report_s=1.0)
ME = worker("trainer")


def server_with_a_trainer() -> Server:
    server = Server(SETTINGS, 0.0, 1, fresh=True)
    server.handle(hello(ME, life="first"), sender="first", now=0.0)
    server.handle(report(1), sender="first", now=0.0)
    return server


def test_the_same_life_on_another_connection_is_no_other_worker() -> None:
    server = server_with_a_trainer()
    assert server.handle(hello(ME, life="first"), sender="again", now=1.0) == []
    (answer,) = server.handle(report(2), sender="again", now=1.0)
    assert answer[0] == "again"


def test_of_two_that_said_hello_together_the_second_does_not_speak_for_the_first() -> None:
    server = Server(SETTINGS, 0.0, 1, fresh=True)
    for life in ("first", "second"):
        server.handle(hello(ME, life=life), sender=life, now=0.0)
    server.handle(report(1), sender="first", now=0.0)
    for number in (2, 3):  # whatever it says, the same as the first one too
        outbox = server.handle(report(number), sender="second", now=1.0)
        assert [message.code for _, message in outbox if isinstance(message, Refusal)] == ["shard-taken"]
    assert server.state.known(ME).lease_end == SETTINGS.lease_s, "its own silence is not hidden by another's words"
