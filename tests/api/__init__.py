"""Tests of what a user sees: `open`, `Weights`, `serve`, `connect`, and the same as coroutines."""
