"""Every decision of one worker: what its buffer is, what it may read, when its caller's call has ended."""
