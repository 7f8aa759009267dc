"""What is true in a simulated cluster, from what can be seen from outside: bytes, messages, events, effects and faults.

Nothing here or in `judges` asks the core: of it they import messages, names and events, and read no table of server or
worker. A test holds them to that.
"""
