"""A worker in a process of its own, to be killed or stopped. Prints what the test waits for, one line each.
All take the silence limit as a last argument.

    peer.py source KIND SIZE CHUNK READY     exports "k" with the first READY chunks there; prints its endpoint; has the
                                             others once it is sent a line
    peer.py reader KIND SIZE CHUNK ENDPOINT  reads "k"; prints `stored N` for each chunk, or now and then, and
                                             `end ...`, with `right` or `wrong` for what it has then
    peer.py forgetful KIND SIZE CHUNK READY  is in the middle of serving and reading when its main thread ends
"""

import sys

import kit

from tensorhub.protocol.manifest import chunk_count
from tensorhub.transport.base import Export, Progress


def say(text: str) -> None:
    """A line, in one piece: several threads may have something to say."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class TalkingTarget(kit.Target):
    def stored(self, chunk: int) -> None:
        super().stored(chunk)
        say(f"stored {chunk}")

    def told(self, size_bytes: int) -> None:
        super().told(size_bytes)
        say(f"stored {size_bytes} B")


def main(role: str, kind: str, size: str, chunk: str, last: str, silence_s: str = "5") -> None:
    kit.use(kit.KINDS[kind])
    right, chunk_bytes = kit.content(int(size)), int(chunk)
    transport = kit.KINDS[kind].make(float(silence_s))
    if role == "reader":
        ended = kit.Ended()
        target = TalkingTarget(right, chunk_bytes)
        transport.read(last, "k", target, ended)
        print("end", ended.wait(), "right" if target.buffer == right else "wrong", flush=True)
        return
    progress = Progress(chunk_count(len(right), chunk_bytes))
    for ready in range(int(last)):
        progress.mark(ready)
    transport.export(Export("k", b"manifest", chunk_bytes, kit.Pieces(right), progress))
    if role == "forgetful":
        target = kit.Target(right, chunk_bytes)
        transport.read(transport.endpoint, "k", target, kit.Ended())
        assert target.progress.wait(int(last) - 1, kit.DEADLINE_S)
        print("leaving", flush=True)
        return
    print(transport.endpoint, flush=True)
    for _ in sys.stdin:
        for rest in range(int(last), progress.chunk_count):
            progress.mark(rest)


main(*sys.argv[1:])
