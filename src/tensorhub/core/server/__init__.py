"""Every decision of the reference server: who lives, what exists, who reads from whom, who may change its buffer."""

from .machine import Outbox, Server

__all__ = ["Outbox", "Server"]
