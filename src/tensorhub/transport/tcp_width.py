"""How many streams a read has: one more doubling as long as it brings more, and back where it does not.

    width = Width(settings, 1)
    width.look(now, arrived_bytes)      now and then: how many streams the read should have from now on

Rules:
1. A rate is that of a window of `probe_s`. The window in which streams came or went is not counted.
2. The number is doubled to try, and halved again unless the rate has become `GAIN` times what it was. After a trial in
   vain the next one waits, each time for twice as long.
3. What comes slower than `probe_rate_bytes_per_s` is held up by its link: it has one stream (decision 0011).
   No fewer, in any case, than the source has addresses: each has a link of its own.
4. A stream that gets `stream_rate_bytes_per_s` is held up by its core: of those there are no more than cores.

Pure: it is told the time. The numbers are from decision 0030.
"""

from .tcp_settings import TcpSettings

GAIN = 1.25  # two streams where one stream's cap is the limit give 2.0; where their link is, 1.0 and some noise
PAUSES = 8  # windows until the number is tried again that was tried in vain


class Width:
    """For one read. Not thread-safe: its first thread asks."""

    def __init__(self, settings: TcpSettings, streams: int, *, cores: int, least: int = 1) -> None:
        self.streams = streams
        self._least = least
        self._settings = settings
        self._cores = cores
        self._since: float | None = None  # when the window began
        self._arrived_bytes = 0  # by then
        self._is_settling = False
        self._before: float | None = None  # the rate before the trial that is under way
        self._tried_again_at = 0.0
        self._pause_s = PAUSES * settings.probe_s

    def look(self, now: float, arrived_bytes: int) -> int:
        """So many streams from now on; `arrived_bytes` have come since the read began."""
        if self._since is None:
            self._since, self._arrived_bytes = now, arrived_bytes
        took_s = now - self._since
        if took_s < self._settings.probe_s:
            return self.streams
        rate = (arrived_bytes - self._arrived_bytes) / took_s
        self._since, self._arrived_bytes = now, arrived_bytes
        if self._is_settling:
            self._is_settling = False
        else:
            self._judge(now, rate)
        return self.streams

    def set(self, streams: int) -> None:
        """Somebody else has decided; what follows is measured anew."""
        self._change(streams)
        self._before = None

    def _judge(self, now: float, rate: float) -> None:
        before, self._before = self._before, None
        if self.streams > self._least and rate < self._settings.probe_rate_bytes_per_s:
            self._change(self._least)
        elif before is not None and rate < GAIN * before:
            self._change(max(self._least, self.streams // 2))
            self._tried_again_at, self._pause_s = now + self._pause_s, 2 * self._pause_s
        elif now >= self._tried_again_at and self._may_widen(rate):
            self._before = rate
            self._change(2 * self.streams)

    def _may_widen(self, rate: float) -> bool:
        settings, wider = self._settings, 2 * self.streams
        is_held_up_by_cores = 0 < settings.stream_rate_bytes_per_s * self.streams <= rate
        most = min(settings.most_streams, self._cores) if is_held_up_by_cores else settings.most_streams
        return wider <= most and rate > 0 and rate >= settings.probe_rate_bytes_per_s

    def _change(self, streams: int) -> None:
        self.streams, self._is_settling = streams, True
