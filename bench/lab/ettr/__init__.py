"""Effective training time: how much of a run its trainer trains, while processes of every role are killed.

A trainer, some rollouts and a reference server work as in a real run: a step needs samples, which rollouts make with
the newest weights that they can get. In one step of ten one process gets SIGKILL. Two ways to go on are compared, under
the same failures:

    peers    only the process that was killed is started again. A trainer fills itself from the rollouts, a rollout from
             its peers, and a server learns everything from the workers. Each life of a replica has a name of its own:
             a name is free again only when the lease of its former life has ended (`same-name` shows what that costs)
    file     nobody is filled by a peer: everything is killed and started again, and goes on from a checkpoint file

Both use TensorHub to hand over weights, write the same checkpoint file every ten steps, and start processes alike: a
fork, which costs nothing, and a sleep that stands for the start of a program. So all may start at once, as on machines
of their own, and two cores do not make the restart of everything slower than the restart of one.

What the weights of a step have to be follows from its number and the seed alone (`content`). Whoever has got weights
hashes them, and the hashes are compared with those that the director computes by itself: one difference fails the run.
"""
