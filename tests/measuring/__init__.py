"""The benchmarks: that they run, never how fast."""
