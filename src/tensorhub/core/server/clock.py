"""The time awake: the caller's clock, less the time for which the server stood still.

While a lease runs, the server asks to be called at least as often as workers report. When it is called much later, it
stood still for that long: it was stopped, swapped out or moved. It heard nobody meanwhile, so that time does not count.
"""

from dataclasses import dataclass

LATE = 0.5  # of the time between two reports: to be called later than that is a pause, not a slow timer or loop


@dataclass
class Clock:
    """One life's time."""

    now: float  # awake
    started: float
    paused_s: float = 0.0  # how far it lags behind the caller's

    def advance(self, caller_now: float, *, due: float, report_s: float) -> bool:
        """The caller's clock says `caller_now`; it was to call at `due`, in time awake. Returns whether it paused.

        A pause counts from when the server wanted to be called, so between two pauses a lease loses the time of one
        report: however often the server stands still, the dead are gone after as many calls as a lease has reports.
        """
        late_s = caller_now - (self.paused_s + due)
        is_pause = late_s > LATE * report_s
        if is_pause:
            self.paused_s += late_s
        awake = caller_now - self.paused_s
        self.now = max(self.now, awake if late_s < 0 else max(awake, due))  # what was due is due, however it rounds
        return is_pause
