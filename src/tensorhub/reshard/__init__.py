"""Any layout to any layout: arithmetic on boxes and tiles, as pure functions over flat numpy arrays.

    boxes of a shard ──▶ BoxTable ─┐
    boxes of others  ──▶ BoxTable ─┼─▶ Grid ──▶ Tiles of a shard ──▶ digests, manifest, chunks
                                   │                    │
                                   └────────────────────┴──▶ Plan: which tile from which source, as strided copies

| file | is |
|---|---|
| `table.py`, `wire.py` | the boxes of one shard as columns; how they and a grid travel |
| `grid.py` | the cuts that all layouts share |
| `cells.py` | the tiles of a shard: where each one lies |
| `overlaps.py`, `coverage.py` | what cannot be: memory that two boxes share in part; holes; tensors that differ |
| `chunks.py` | the tiles of a shard in memory order, in runs of at most 4 MiB |
| `copies.py`, `plan.py` | what to fetch from whom, as loops over runs of bytes |
| `derive.py` | tile digests of memory, and manifests derived from other layouts' manifests |

| `carry.py` | a plan carried out with numpy |

Nothing here looks at memory but `derive.digests_of` and what carries a plan out; both are given it. All arithmetic is
per box, per cut or per tile, never per element.
"""
