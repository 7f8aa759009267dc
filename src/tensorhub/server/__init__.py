"""Every decision of the reference server: who lives, what exists, who reads from whom, who may change its buffer.

Read the files in this order; each imports only what stands before it, and `tests/tidy/core_order.py` holds that.

- Tables, which know no rule: `clock`, `receipts`, `numbers`, `pace` (of a read), `roster` (who lives), `open_reads`,
  `groups` (the calls of replicas), `catalog` (versions, and who has them), `membership` (sessions).
- `state`: all tables and their one owner. `facts`: questions about it. `decisions`: what a rule may decide.
- `rules/`: facts in, decisions out.
- `apply` carries decisions out. `evidence`, `rollcall`, `intake` and `sessions`: what comes in changes the state.
- `invariants` and `snapshot`: what must be true of the state, and its picture for people.
- `machine`: `Server`, which takes every message in, decides for whoever is dirty, and says what is new.
"""

from .machine import Outbox, Server

__all__ = ["Outbox", "Server"]
