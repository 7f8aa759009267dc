"""Every decision of the reference server and of the workers, as machines that are told everything and touch nothing.

`core.server.Server` and `core.worker.machine.Worker` take in messages and events together with the time, and answer
with what to send and what to do. The same code runs in production, in the simulator, and in the text scenarios of the
tests. Nothing here may read a clock, a socket or chance, write a log, or iterate a set.
"""
