"""Every decision of one worker: what its buffer is, what it may read, when its caller's call has ended.

Read the files in this order; each imports only files that stand before it.

- `events`: what the shell tells the machine, and what the machine wants done.
- `buffer` (what the registered memory may become), `copies` (host copies), `read_slot` (the one open read): parts of a
  worker, each with rules of its own.
- `state`: all of that together, its reports and its invariants.
- `reads`, `calls`: steps that change it.
- `machine`: `Worker`, which takes every event in and then every step that has become possible.
"""
