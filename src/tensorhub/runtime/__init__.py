"""RUNS: clocks, sockets and threads around the pure machines of `core`. Nothing here decides what happens.

server, serving           the reference server: HTTP and WebSocket, a server in a thread
client, connection        one worker: its machine, and its connection to the reference server
dataplane, trust          what the machine wants of transport and memory, and until when a read counts
loops                     the one thread with an event loop that all workers of a process share
config, codec             settings from arguments and the environment; messages as bytes
"""
