"""What one version of one shard is made of, tile by tile: digests that are the same however a replica cuts.

A tile is one cell of the grid that all layouts of a version share. Its digest is taken over its elements in row-major
order of the global tensor, so it depends on no layout. Hence the manifest of *any* layout follows from the publisher's
tile digests, without any weights: all readers of one layout know the same root before the first byte moves.

`digests` has 16 bytes for each tile of each box, in the order of the layout's boxes, and within a box in row-major
order. It is empty where the publisher said verify="none"; then `salt` is unique to that content.
"""

from hashlib import blake2b

import msgspec

from .decoding import Undecodable, decoded
from .errors import UsageError
from .manifest import DIGEST_BYTES
from .metadata import decode_metadata
from .names import TILED, Digest


class TileManifest(msgspec.Struct, frozen=True):
    """The layout, the grid, and the digest of every tile. Its root is what the server pins for a version and shard."""

    layout: Digest
    grid: Digest
    algorithm: str  # "xxh3-128" or "none"
    tile_count: int
    digests: bytes
    salt: str = ""
    metadata: bytes = b""  # as `encode_metadata` has made it: the same in all shards

    def digest_of(self, tile: int) -> bytes:
        """The digest of one tile (16 bytes)."""
        return self.digests[tile * DIGEST_BYTES : (tile + 1) * DIGEST_BYTES]

    def root(self) -> Digest:
        """The content's identity, for this layout: one digest over everything above. It says that there are tiles."""
        return Digest(TILED + blake2b(self.encode(), digest_size=DIGEST_BYTES).hexdigest())

    def encode(self) -> bytes:
        """As it travels from source to reader."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(TileManifest)


def decode_tile_manifest(data: bytes) -> TileManifest:
    """A manifest from a peer's bytes. Raises `UsageError` if it is malformed or contradicts itself."""
    try:
        manifest = decoded(_decoder, data)
    except Undecodable as error:
        raise UsageError(f"malformed manifest of tiles: {error}") from error
    expected = 0 if manifest.algorithm == "none" else manifest.tile_count * DIGEST_BYTES
    if manifest.tile_count < 0 or len(manifest.digests) != expected:
        raise UsageError(
            f"manifest of {manifest.tile_count} tiles with {len(manifest.digests)} B of digests, not {expected} B"
        )
    decode_metadata(manifest.metadata)
    return manifest
