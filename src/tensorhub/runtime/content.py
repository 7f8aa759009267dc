"""One version in a worker's memory, whole or being filled, and its export by every transport."""

import logging
import threading
from collections.abc import Mapping
from functools import partial

from ..core.errors import TensorHubError, error_from_code
from ..core.manifest import Manifest
from ..core.names import Digest, Version
from ..memory.digests import changed_chunks, changed_of
from ..memory.fill import FillSink
from ..memory.registration import Registration
from ..memory.tiles.across import Across
from ..memory.tiles.tiled import TiledVersion
from ..transport.base import Export, Transport
from ..transport.progress import Progress
from ..transport.shortages import as_ours
from .loops import in_thread

Known = Manifest | TiledVersion  # what a version is, in whichever way it was published

_log = logging.getLogger(__name__)


def key_of(model: str, version: int, shard: int, *, on_host: bool = False) -> str:
    """Under which peers read what a worker has of a version, in its tensors or in host memory."""
    return f"{model}/{version}/{shard}{'/host' if on_host else ''}"


def _as_ours(error: Exception, scheme: str) -> TensorHubError:
    """Without a traceback: it would hold all that is exported."""
    text = f"it is held, but peers cannot read it by {scheme}: {error}"
    hint = f"unpublish() takes it back; TENSORHUB_TRANSPORTS can leave {scheme} out"
    code = error.code if isinstance(error, TensorHubError) else as_ours(error, scheme).code
    return error_from_code(code, text, hint=hint)


class Content:
    """A version in the registered memory or in a host copy."""

    def __init__(self, version: Version, root: Digest, key: str, registration: Registration) -> None:
        self.version = version
        self.root = root
        self.key = key
        self.registration = registration
        self.manifest: Known | None = None
        self.progress: Progress | None = None
        self.fill: FillSink | Across | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def is_of(self, version: Version, root: Digest) -> bool:
        """It is this content, and no other that has the same number."""
        return (self.version, self.root) == (version, root)

    def export(self, transports: Mapping[str, Transport], manifest: Known, progress: Progress) -> TensorHubError | None:
        """Let peers read it, unless it was stopped meanwhile: a fill learns its manifest in a transport's thread.

        Returns why not everybody can, if a transport does not take it: two peers that share that one would choose it.
        """
        wrong: list[TensorHubError] = []
        export = Export(self.key, manifest.encode(), manifest.chunk_bytes, self.registration.stream, progress)
        for scheme, transport in transports.items():
            with self._lock:
                self.manifest, self.progress = manifest, progress
                if not self._is_stopped:
                    try:
                        transport.export(export)
                    except Exception as error:  # noqa: BLE001 - whatever is wrong with one way, the others serve
                        wrong.append(_as_ours(error, scheme))
                        _log.warning("%s cannot be read by %s: %r", self.key, scheme, error)
        return wrong[0] if wrong else None

    async def noted(self) -> None:
        """All of it has come, and was verified: note what no manifest has a digest of. Raises `UsageError`."""
        if isinstance(self.manifest, TiledVersion) and not self.manifest.is_whole:
            await in_thread(partial(self.manifest.note_parts, self.registration), name="digest")

    def stop(self, why: TensorHubError) -> None:
        """No export of it begins any more, and no further chunk comes."""
        with self._lock:
            self._is_stopped = True
        if self.fill is not None:
            self.fill.revoke(why)
        if self.progress is not None:
            self.progress.fail(str(why))


def changed_tensors(registration: Registration, known: Known) -> tuple[list[str], dict[int, list[str]]]:
    """Names of the tensors whose bytes now differ, and by chunk the names of those of which at least one does.

    Blocks; raises `UsageError` if that cannot be told.
    """
    if isinstance(known, TiledVersion):
        return known.names(known.changed(registration), registration), {}
    return changed_of(registration.layout, known, changed_chunks(registration, known))
