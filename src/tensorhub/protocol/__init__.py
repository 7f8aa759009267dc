"""The words that server and workers share, as values: messages, manifests, layouts, events, status and errors.

The machines that speak them are `server.Server` and `worker.machine.Worker`: they take in messages and events together
with the time, and answer with what to send and what to do. The same code runs in production, in the simulator, and in
the text scenarios of the tests. Nothing in these three packages may read a clock, a socket or chance, write a log, or
iterate a set.
"""
