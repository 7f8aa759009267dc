"""One version in a worker's memory, whole or being filled, and its export by every transport."""

import threading
from collections.abc import Mapping

from ..core.errors import TensorHubError
from ..core.manifest import Manifest
from ..core.names import Digest, Version
from ..memory.fill import FillSink
from ..memory.registration import Registration
from ..transport.base import Export, Transport
from ..transport.progress import Progress


class Content:
    """A version in the registered memory or in a host copy."""

    def __init__(self, version: Version, root: Digest, key: str, registration: Registration) -> None:
        self.version = version
        self.root = root
        self.key = key
        self.registration = registration
        self.manifest: Manifest | None = None
        self.progress: Progress | None = None
        self.fill: FillSink | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def is_of(self, version: Version, root: Digest) -> bool:
        """It is this content, and no other that has the same number."""
        return (self.version, self.root) == (version, root)

    def export(self, transports: Mapping[str, Transport], manifest: Manifest, progress: Progress) -> None:
        """Let peers read it, unless it was stopped meanwhile: a fill learns its manifest in a transport's thread."""
        for transport in transports.values():
            with self._lock:
                self.manifest, self.progress = manifest, progress
                if not self._is_stopped:
                    stream = self.registration.stream
                    transport.export(Export(self.key, manifest.encode(), manifest.chunk_bytes, stream, progress))

    def stop(self, why: TensorHubError) -> None:
        """No export of it begins any more, and no further chunk comes."""
        with self._lock:
            self._is_stopped = True
        if self.fill is not None:
            self.fill.revoke(why)
        if self.progress is not None:
            self.progress.fail(str(why))
