"""What a caller wishes beside its calls: versions that are kept, and one that is fetched ahead."""

import logging

from msgspec.structs import replace

from ..core.errors import DeadlineExceeded, UsageError
from ..core.messages import MAX_PINS, Failure, Hello, Spec
from ..core.names import Version, WorkerId
from ..core.version_spec import parse_spec
from ..core.worker.events import Called, Wished
from .config import Options
from .driver import Driver, failed
from .questions import check_held

_log = logging.getLogger(__name__)

MORE_ROOM = "raise host_bytes, or give this process more memory"


class Wishes:
    """Of one worker. Used in the worker's loop only."""

    def __init__(self, me: WorkerId, driver: Driver) -> None:
        self._me, self._driver = me, driver

    def wish(self, **wishes: object) -> None:
        """The other wishes stay as they are."""
        worker = self._driver.worker
        known = {"prefetch": worker.prefetch, "pins": worker.pins, **wishes}
        self._driver.feed(Wished(**known))  # type: ignore[arg-type]

    def warn_if_in_vain(self) -> None:
        """Nothing will ever be fetched ahead of these tensors: for want of host memory."""
        data = self._driver.data
        if data.copies.why_none and data.registration is not None:
            text = "%s fetches nothing ahead: its limit on host memory has no room for a copy of %d B: %s; %s"
            _log.warning(text, self._me, data.registration.size_bytes, data.copies.why_none, MORE_ROOM)

    def update_at_once(self, called: Called, hello: Hello) -> Version | None:
        """What an update to "prefetched" comes to without the server; None where that has to be asked.

        Raises `UsageError` where nothing is ever fetched ahead, with the limit that has no room for it.
        """
        known = self._driver.worker.update_at_once(hello, called)
        if not isinstance(known, Failure):
            return known
        why, wishes = self._driver.data.copies.why_none, hello.prefetch == "always" or self._driver.worker.prefetch
        raise failed(replace(known, message=f"{known.message}; {why}") if why and wishes else known)

    def prefetch(self, spec: Spec) -> None:
        """A host copy of that version, and of newer ones as they come if it is "latest"."""
        parse_spec(spec)
        if not self._driver.worker.is_registered:
            raise UsageError(f"prefetch on {self._me} before register()", hint="register the tensors first")
        self.warn_if_in_vain()
        self.wish(prefetch=spec)

    async def pin(self, version: Version, options: Options, deadline: float) -> None:
        """Raises `VersionUnavailable` if nobody has it."""
        pins = self._driver.worker.pins
        if version in pins:
            return
        if len(pins) >= MAX_PINS:
            raise UsageError(f"{self._me} has pinned {len(pins)} versions, which is the most", hint="unpin() some")
        await self._heard((*pins, version), deadline)
        try:
            await check_held(options, self._me.model, version, deadline)
        except BaseException:
            self.wish(pins=tuple(pin for pin in self._driver.worker.pins if pin != version))
            raise

    async def unpin(self, version: Version, deadline: float) -> None:
        """Does nothing where there was no such pin."""
        await self._heard(tuple(pin for pin in self._driver.worker.pins if pin != version), deadline)

    async def _heard(self, pins: tuple[Version, ...], deadline: float) -> None:
        """Returns once the server knows of the pins."""
        self.wish(pins=pins)
        worker = self._driver.worker
        number = worker.reported
        if not await self._driver.until(lambda: worker.acknowledged >= number, deadline):
            text = f"{self._me}: the reference server has not heard of the pins {list(pins)} in time"
            raise DeadlineExceeded(text, hint="is it running? The pins count once it hears of them")
