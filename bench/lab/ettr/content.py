"""The weights: those of a step follow from those of the step before it, and so from the seed and the number alone.

One byte that is wrong stays wrong in all steps that follow, and a step that is left out or done twice on the way makes
other weights: whoever goes on from what it was filled with cannot hide what that was.
"""

from collections.abc import Iterator

import numpy as np

from ..content import Tensors, fingerprint, make_tensors

FACTOR = np.uint8(5)  # odd: no two contents become one


class Weights:
    """The tensors of one process, and how a step changes them."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        self.tensors: Tensors = make_tensors(size_bytes)
        chance = np.random.default_rng(seed)
        self._noise = [chance.integers(0, 256, size=len(each), dtype=np.uint8) for each in self.tensors.values()]

    def step(self, number: int) -> None:
        """From those of the step before to those of this one."""
        for tensor, noise in zip(self.tensors.values(), self._noise, strict=True):
            np.multiply(tensor, FACTOR, out=tensor)
            np.add(tensor, noise, out=tensor)
            np.add(tensor, np.uint8(number % 256), out=tensor)


def expected(size_bytes: int, seed: int, steps: int) -> Iterator[str]:
    """The hash of the weights before the first step, and after each of them."""
    weights = Weights(size_bytes, seed)
    yield fingerprint(weights.tensors)
    for number in range(1, steps + 1):
        weights.step(number)
        yield fingerprint(weights.tensors)
