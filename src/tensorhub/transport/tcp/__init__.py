"""The tcp transport: weights over plain sockets."""
