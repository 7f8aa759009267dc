"""Every decision of one worker: what its buffer is, what it may read, when its caller's call has ended.

Read the files in this order; each imports only what stands before it, and `tests/tidy/core_order.py` holds that.

- `events`: what the shell tells the machine, and what the machine wants done.
- The parts of a worker, each with rules of its own: `buffer` (what the registered memory may become), `read_slot` (the
  one open read), `host_copies`, `report_book` (when to report), `proofs` (what the server has signed), `call` and
  `departure` (what the caller wants).
- `state`: all of that together, which is all that a worker is.
- Questions about it: `mistakes` of the caller, errors at `deadlines`, `reporting`, `invariants`.
- Steps that change it: `filling` (from one version to another), `reading`, `calling`, `closing`, `orders`.
- `machine`: `Worker`, which takes every event in and then every step that has become possible.
"""
