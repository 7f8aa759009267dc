"""A trainer and rollouts as Ray actors, some of which are killed, replaced and added while the weights go on.

    python examples/ray_actors.py

Ray starts an actor again that was killed. It then fills itself from those that live; the trainer goes on above
the version that they hold. Nothing is written to disk, and no tensor passes through Ray.
"""

import numpy as np
import ray

import tensorhub
from tensorhub.integrations.ray import open_in_actor, server_address, start_server

MODEL = "policy"


def parameters() -> dict[str, np.ndarray]:
    return {"w": np.zeros(1 << 20, np.float32)}


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Trainer:
    """Makes version n all n: so everybody can see what a version has to be."""

    def __init__(self) -> None:
        self.parameters = parameters()
        self.weights = open_in_actor(MODEL)
        self.weights.register(self.parameters)
        view = tensorhub.connect(server_address())
        self.next = view.next_version(MODEL)  # a restarted server answers when it has heard who holds what
        if any(version.holders for version in view.versions(MODEL)):
            self.weights.replicate("latest", timeout=60)  # another one was here before: the rollouts have its weights

    def step(self) -> int:
        with self.weights.mutating(version=self.next):
            self.parameters["w"] += self.next - self.parameters["w"][0]
        self.next += 1
        return self.next - 1


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Rollout:
    def __init__(self) -> None:
        self.parameters = parameters()
        self.weights = open_in_actor(MODEL, reliable=False)
        self.weights.register(self.parameters)
        self.weights.replicate("latest", timeout=60)

    def update(self, version: int) -> tuple[int, float, float]:
        """The version now held, and the least and the greatest of its parameters.

        It waits for that version first: the trainer may have published it while no server was there.
        """
        self.weights.wait_for(version, timeout=60)
        version = self.weights.update("latest", timeout=60)
        return version, float(self.parameters["w"].min()), float(self.parameters["w"].max())


def show(what: str, version: int, rollouts: list) -> None:
    """All rollouts hold the version, whole."""
    held = ray.get([rollout.update.remote(version) for rollout in rollouts], timeout=120)
    assert all(each == (version, version, version) for each in held), (what, version, held)
    print(f"{what}: {len(rollouts)} rollouts hold version {version}")


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    print("reference server at", start_server(lease_s=2, report_s=0.2))
    trainer, rollouts = Trainer.remote(), [Rollout.remote() for _ in range(2)]
    version = ray.get(trainer.step.remote(), timeout=120)
    show("at first", version, rollouts)

    rollouts.append(Rollout.remote())
    show("one was added", ray.get(trainer.step.remote(), timeout=120), rollouts)

    ray.kill(rollouts[0], no_restart=False)
    show("one was killed, and replaced by Ray", ray.get(trainer.step.remote(), timeout=120), rollouts)

    ray.kill(trainer, no_restart=False)
    show("the trainer was killed, and filled from the rollouts", ray.get(trainer.step.remote(), timeout=120), rollouts)

    ray.kill(ray.get_actor("tensorhub-server"), no_restart=False)
    version = ray.get(trainer.step.remote(), timeout=120)
    show("the reference server was killed, and learned from the workers", version, rollouts)

    ray.kill(rollouts.pop())
    show("one was taken away", ray.get(trainer.step.remote(), timeout=120), rollouts)
    ray.shutdown()


if __name__ == "__main__":
    main()
