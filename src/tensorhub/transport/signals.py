"""What signals may do to our threads.

It must never: change what the process does with a signal. That is its owner's.
"""

import signal


def block_sigpipe() -> None:
    """In the calling thread, which is one of ours: a peer that leaves is an error there, and never ends the process.

    Python ignores SIGPIPE; many programs, such as command line tools, set it back to its default, which is to end.
    """
    if hasattr(signal, "pthread_sigmask") and hasattr(signal, "SIGPIPE"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
