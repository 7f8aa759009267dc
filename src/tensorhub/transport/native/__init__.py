"""The mover: bytes between workers without the interpreter, by a small library in C, used where it could be built.

`build` makes the library, `load` finds it and says why it is not used where it is not, `shapes` has the structures that
both sides know, `reads` prepares a read for it. Decision 0022 has the design.

It must never: be needed. Without it Python moves the same bytes over plain sockets, and checks each chunk once it is
there.
"""
