"""The command line: what it draws, from values alone, and what its commands do as programs."""
