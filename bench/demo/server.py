"""The reference server's process: the command `tensorhub serve`, but it ends when the director does."""

import runpy

from .parent import Parent

if __name__ == "__main__":
    Parent()
    runpy.run_module("tensorhub", run_name="__main__", alter_sys=True)
