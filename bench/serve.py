"""`tensorhub serve` for the benchmarks: the same, but it ends with the process that started it, however that ended."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For what `with` blocks and signal handlers cannot promise."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    from tensorhub.cli.main import app

    die_with_parent()
    app()
