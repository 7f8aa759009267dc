"""Any layout to any layout: arithmetic on boxes and tiles, as functions over flat numpy arrays.

    boxes of a shard ──▶ BoxTable ─┐
    boxes of others  ──▶ BoxTable ─┼─▶ Grid ──▶ Tiles of a shard ──▶ digests, manifest, chunks
                                   │                    │
                                   └────────────────────┴──▶ Plan: which tile from which source, as strided copies

| file | has |
|---|---|
| `grid.py` | boxes of a shard as columns, the cuts that all layouts share, tiles of a shard, and its chunks |
| `copies.py` | strided copies; boxes that share memory; holes |
| `plan.py` | digests of tiles and derived manifests; which tile from which source |
| `wire.py` | how boxes, grids and published shards travel |
| `read.py` | a fill from sources of other layouts, and the version that results |

All arithmetic is per box, per cut or per tile, never per element.
"""
