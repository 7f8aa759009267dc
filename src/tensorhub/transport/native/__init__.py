"""The mover: bytes between workers without the interpreter, by a small library in C, used where it could be built.

`build` makes the library, `load` finds it and says why it is not used where it is not, `shapes` has the structures that
both sides know. `native_read` and `native_serve`, beside this folder, use it. Decision 0022 has the design.

It must never: be needed. Whatever it does, the Python code beside it does too, with the same bytes on the wire.
"""
