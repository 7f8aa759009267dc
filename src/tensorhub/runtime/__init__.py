"""Clocks, sockets and threads around the machines of `server` and `worker`. Nothing here decides what happens.

server, serving, standby, journal      the reference server: HTTP and WebSocket, in the foreground or in a thread
answers, dashboard, metrics            what the server shows; `metrics` has the page of workers, too
client, opening, driver, connection    one worker: its calls, its machine, its connection to the server
dataplane, content, copies, tile_reads what the machine wants of transport and memory
questions                              what any process may ask a server over HTTP
loops                                  the one thread with an event loop that all workers of a process share
config, transports                     settings from arguments and the environment; which transports there are
"""
