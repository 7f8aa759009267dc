"""Tests of what runs: server and worker shells, over real sockets."""
