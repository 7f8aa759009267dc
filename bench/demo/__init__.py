"""The main job: a real RL run over TensorHub, on the CPU of one machine, with nothing downloaded.

    orchestrate ──┬── tensorhub serve        the reference server; is killed and restarted half-way
                  ├── trainer   (1 process)  learns from samples, publishes a version after every step
                  └── rollout   (3 and 1)    sample and score, update("latest"); one is killed, one joins late

The policy learns to put letters in alphabetical order (`task`, `policy`, `grpo`). Samples go from the rollouts to the
trainer over a socket (`samples`); weights go through TensorHub (`sharded`). Each process writes what happened to a
file (`events`), from which everything shown is made: `live`, `summary`, `checks`, `report`.

To learn how to use the library, read `sharded`, `trainer` and `rollout`, in this order.
"""
