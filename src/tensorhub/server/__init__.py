"""The reference server's decisions: which workers live, which versions exist, and which worker reads from which source.

Read the files in this order; each imports only files that stand before it.

- `members` (workers, their open reads), `groups` (calls of replicas), `versions`: tables, which know no rule.
- `state`: all tables, the clock, and the questions and changes that several rules share.
- `layouts`, `selection`, `admission`, `retention`, `sources`: facts in, answers with their reasons out.
- `apply`, `calls`, `reads`: steps that change the state.
- `content`, `sessions`: what a report changes. `snapshot`: status and invariants.
- `machine`: `Server`, which takes a message in, decides for each dirty worker, and returns what to send.
"""

from .machine import Outbox, Server

__all__ = ["Outbox", "Server"]
