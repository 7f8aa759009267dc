"""Real processes: a reference server from the command line, a process for each worker, sockets, and signals.

The weights of every worker lie in memory that the test process has mapped too. So the test writes what a trainer
publishes, and judges what a reader accepted, outside the library: byte by byte, while a worker is stopped, and after it
was killed. `worker` is the process, `memory` its weights and what they should be, `cluster` starts, kills and asks.
"""
