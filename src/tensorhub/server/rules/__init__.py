"""The server's rules: facts in, decisions out. None of them knows the machine, and none changes anything."""
