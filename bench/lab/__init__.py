"""The laboratory: the paper's workloads on one machine, with real processes on real, slow links.

Each worker is a process in a network namespace of its own, behind a link that the kernel shapes; sites are joined by a
relay that delays. On the same links run TensorHub and what a user would otherwise take. What is measured is *stall*:
the seconds in which a worker could have computed and did not, because of weights.

It is a user: it knows of the product what the public interface shows, except that the other strategies borrow the
transport and the digests, so that they are not slower because the socket program is poor. It must never count as good
what has another hash than the trainer's, or call a figure valid when the processor was the bottleneck.
"""
