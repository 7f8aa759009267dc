"""MOVES BYTES: registered memory of one worker, read chunk by chunk by another.

`base` says what every transport offers and which rules it keeps. One contract suite (`tests/transport`) checks all of
them.

    transport   endpoint             between                          needs              cost at the source
    cuda        cuda://place/name    two workers of one host, GPUs    the extra `cuda`   none: its readers copy
    local       local://place/name   two workers of one host          Linux              none: its readers copy
    nixl        nixl://host:port     RDMA, NVLink                     the extra `nixl`   none: its readers copy
    tcp         tcp://host:port      any two hosts; across sites      nothing            one thread for each stream

`base.choose` is the rule by which a reader picks one, with the reason why it is no better one.

Nothing here knows what a version, a group or a replica is.
"""
