"""A user's program: a trainer publishes, a rollout reads. `make package` runs it beside an installed wheel.

mypy and pyright check it with the types that the package brings, so it says what it expects.
"""

from typing import assert_type

import numpy as np

import tensorhub
from tensorhub.transport.native.load import library, why_not


def main() -> None:
    policy, engine = ({"w": np.zeros((1 << 20,), np.float32)} for _ in range(2))
    with tensorhub.serve(insecure=True) as server:
        where = server.address
        trainer = tensorhub.open("policy", replica="trainer", server=where, insecure=True, transports="tcp")
        rollout = tensorhub.open("policy", replica="rollout-0", server=where, insecure=True, transports="tcp")
        with trainer, rollout:
            assert_type(trainer, tensorhub.Weights)
            trainer.register(policy)
            rollout.register(engine)
            with trainer.mutating(version=1):
                policy["w"] += 0.5
            assert_type(rollout.replicate("latest"), int)
            assert (engine["w"] == 0.5).all()
            assert_type(rollout.version, int | None)
            try:
                rollout.replicate(7)
            except tensorhub.VersionUnavailable as error:
                assert_type(error.hint, str | None)
        assert_type(tensorhub.connect(where, insecure=True).models(), list[str])
    assert library() is not None, why_not()


if __name__ == "__main__":
    main()
    print("published and read, by the native mover")
