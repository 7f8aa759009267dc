"""A source over UCX's TCP, to be stopped: exports "k", of SIZE bytes in chunks of CHUNK, and prints its endpoint.

nixl_peer.py SIZE CHUNK
"""

import sys

import kit

from tensorhub.transport.nixl import NixlSettings, NixlTransport


def main(size: str, chunk: str) -> None:
    transport = NixlTransport(NixlSettings(tls="tcp", allow_tcp=True))
    transport.export(kit.full("k", kit.content(int(size)), int(chunk)))
    print(transport.endpoint, flush=True)
    sys.stdin.read()


main(*sys.argv[1:])
