"""What a worker has, told apart by how it is laid out."""

from tensorhub.protocol.messages import Empty, HostCopy
from tensorhub.protocol.names import BOXED, Digest, Shard, Version
from tensorhub.server.members import Content, Line

NOW, BEFORE = Digest(f"{BOXED}now"), Digest(f"{BOXED}before")


def test_a_copy_of_tensors_that_were_registered_before_is_of_their_line() -> None:
    line = Line(2, Shard(1), NOW)
    copies = (HostCopy(1, Version(1), Digest("r"), layout=BEFORE), HostCopy(2, Version(2), Digest("r")))
    content = Content(Empty(), copies, line)
    assert content.line_of(Version(1), is_copy=True) == Line(2, Shard(1), BEFORE)
    assert content.line_of(Version(1), is_copy=False) == line
    assert content.line_of(Version(2), is_copy=True) == line
