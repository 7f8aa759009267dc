"""Adapters to engines, each tested against the real package; skipped, with the reason, where it is not installed."""
