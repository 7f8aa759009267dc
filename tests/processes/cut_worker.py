"""A worker of a model of Llama's kind that is cut in some way, in a process of its own; commands are lines of JSON.

    cut_worker.py ADDRESS REPLICA KIND RANK RANKS      KIND: "trainer" (rows, as FSDP) or "engine" (tensor parallel)

Each command is answered by one line. What a fill has brought is compared with plain indexing, element by element, and
what lies in no box with what was there before. TENSORHUB_TEST_MODEL=large: a model of 589 MB instead of 43.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, it finds its neighbours

import numpy as np

import tensorhub
from transport import llama

llama.INNER = 1028  # so that it can be cut in four, and not in three
if os.environ.get("TENSORHUB_TEST_MODEL") == "large":
    llama.LAYERS, llama.HIDDEN, llama.INNER, llama.VOCABULARY, llama.EXPERT_INNER = 4, 2048, 5504, 32003, 512


class Content(Mapping[str, np.ndarray]):
    """The global tensors of one version, made when they are asked for: every process would keep a model beside its own.

    Every element is another one than in the version before.
    """

    def __init__(self, version: int) -> None:
        self._version = np.uint16(version)
        self._shapes = llama.shapes()
        self._shapes[llama.LM_HEAD] = self._shapes[llama.EMBED]

    def __getitem__(self, name: str) -> np.ndarray:
        own = llama.EMBED if name == llama.LM_HEAD else name  # they are tied
        bits = np.random.default_rng(crc32(own.encode())).integers(0, 1 << 16, self._shapes[name], np.uint16)
        return (bits ^ self._version).view(np.float16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class CutWorker:
    """Carries out commands. A method is a command."""

    def __init__(self, address: str, replica: str, kind: str, rank: int, ranks: int) -> None:
        self.shard = llama.trainer(rank, ranks) if kind == "trainer" else llama.engine(rank, ranks)
        for array in self.shard.arrays.values():
            array.view(np.uint16)[...] = 0x5A5A
        self._outside = self.shard.outside()
        self.weights = tensorhub.open(
            "m", replica=replica, shard=rank, shards=ranks, server=address, timeout=30, call_timeout=60
        )
        self.weights.register(self.shard.arrays, boxes=self.shard.boxes)

    def publish(self, version: int) -> int:
        with self.weights.mutating(version=version, metadata={"step": version}):
            self.shard.fill(Content(version))
        return version

    def fill(self, verb: str = "replicate") -> dict[str, object]:
        before = self._received()
        version = getattr(self.weights, verb)("latest")
        outside = self.shard.outside()
        return {
            "version": version,
            "wrong": self.shard.wrong(Content(version))[:3],
            "is_outside_kept": all((a == b).all() for a, b in zip(self._outside, outside, strict=True)),
            "said": self.weights.metadata,
            "bytes": {name: size - before.get(name, 0) for name, size in self._received().items()},
        }

    def _received(self) -> dict[str, int]:
        found = self.weights.statistics()["bytes_by_source"]
        assert isinstance(found, dict)
        return dict(found)

    def check(self) -> None:
        self.weights.check()

    def spoil(self) -> None:
        """One bit of the first tensor, while it is published."""
        array = next(array for array in self.shard.arrays.values() if array.size)
        array.reshape(-1).view(np.uint16)[0] ^= 1

    def size(self) -> int:
        return sum(box_view.nbytes for _, box_view in self.shard.views)

    def sent(self) -> int:
        return int(str(self.weights.statistics()["sent_bytes"]))

    def close(self) -> None:
        self.weights.close(timeout=10)


def main() -> None:
    address, replica, kind, rank, ranks = sys.argv[1:]
    worker = CutWorker(address, replica, kind, int(rank), int(ranks))
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"value": getattr(worker, command.pop("do"))(**command)}
        except tensorhub.TensorHubError as error:
            answer = {"kind": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
