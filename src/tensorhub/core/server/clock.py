"""The time awake: what the caller's clock says, less the time for which the server stood still.

While a lease runs the server asks to be called once a report. How much later than that it is called, it stood still:
swapped out, stopped, moved. It heard nobody then, so that time passes for nobody.
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
        """It is `caller_now` by the caller's clock, who was to call at `due`, awake. Returns whether that was a pause.

        A pause counts from when the server wanted to be called, so a lease loses a report's time between two of them:
        however often it stands still, the dead are gone after as many calls as there are reports in a lease.
        """
        late_s = caller_now - (self.paused_s + due)
        is_pause = late_s > LATE * report_s
        if is_pause:
            self.paused_s += late_s
        awake = caller_now - self.paused_s
        self.now = max(self.now, awake if late_s < 0 else max(awake, due))  # what was due is due, however it rounds
        return is_pause
