"""A source of its own process: exports "k", of SIZE bytes in chunks of CHUNK, and prints its endpoint.

nixl_peer.py SIZE CHUNK TLS      TLS is what UCX may use: "tcp" is a way that can be stopped, "" its own choice
"""

import sys

import kit

from tensorhub.transport.nixl.transport import NixlSettings, NixlTransport


def main(size: str, chunk: str, tls: str) -> None:
    transport = NixlTransport(NixlSettings(tls=tls, allow_tcp=bool(tls)))
    transport.export(kit.full("k", kit.content(int(size)), int(chunk)))
    print(transport.endpoint, flush=True)
    sys.stdin.read()


main(*sys.argv[1:])
