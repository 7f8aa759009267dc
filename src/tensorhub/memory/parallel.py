"""The same work on many things in a few threads, or in this one where the process may start no more."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")


def in_parallel(work: Callable[[T], V], items: Sequence[T], *, threads: int, name: str) -> list[V]:
    """What `work` gives for each of the items, in order. What it raises first ends it all and is raised here."""
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix=f"tensorhub-{name}") as pool:
            begun = _begun(pool, work, items)
            if begun is not None:
                try:
                    return [future.result() for future in begun]
                finally:
                    while begun:  # and let go: the error of one knows this frame
                        begun.pop().cancel()
    return [work(item) for item in items]


def _begun(pool: ThreadPoolExecutor, work: Callable[[T], V], items: Sequence[T]) -> list[Future[V]] | None:
    """None if not every thread could be started; then nothing is under way when the pool has ended."""
    begun: list[Future[V]] = []
    try:
        for item in items:
            begun.append(pool.submit(work, item))  # noqa: PERF401 - those before the one that fails are cancelled
    except RuntimeError:
        pool.shutdown(wait=True, cancel_futures=True)
        return None
    return begun
