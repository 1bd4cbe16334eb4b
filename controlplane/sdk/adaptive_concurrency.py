"""Number of calls to keep open: the fewest that reach the server's throughput.

No I/O and no clock: the caller reports successes and refusals with their times.
"""


class AdaptiveConcurrency:
    """Compares the texts per second of windows, each with another number of open calls.

    A trial keeps another number open for a window. More calls are kept if the throughput rises by GAIN of
    the rise of the calls, fewer if LOSS of it is left. The first windows have as many successes as calls are
    open, and their trials multiply the number by 4, then by 2. When neither gains, the number is held for
    FIRST_HOLD windows of about LONG successes, later for twice as many up to HOLD, before trials with 3/4 of
    the calls and with twice as many. So no calls are kept open that only wait in the server, where they delay
    its other work.

    A refusal multiplies the number by DECREASE, as in DECbit (Ramakrishnan and Jain 1990), because a server
    without a free place in its queue is still busy; from then on, trials add one call. Refusals of calls that
    were sent before the last decrease change nothing: they report the same overload.
    """

    DECREASE = 7 / 8
    GAIN = 0.1
    LOSS = 0.98
    FIRST_HOLD, HOLD = 4, 32
    LONG = 32

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._lowered_at = float("-inf")
        self._kept = 1.0
        # Texts per second of the kept number, measured by the window before a trial.
        self._rate = 0.0
        self._trial: float | None = None
        # Factors of the trials that are left before the number is held, the next one last.
        self._factors = [2.0, 4.0]
        # Windows before the next trials, how many those were at last, and the fewest successes of a window.
        self._held_windows, self._hold, self._shortest = 0, self.FIRST_HOLD, 1
        # Successes of calls that a larger number had sent; they are of no window.
        self._skipped = 0
        self._began: float | None = None
        self._texts = self._calls = 0

    @property
    def size(self) -> int:
        """Calls to keep open, at least 1."""
        return int(self._kept if self._trial is None else self._trial)

    def succeeded(self, texts: int, sent_at: float, now: float) -> None:
        """Counts a call of so many texts, sent and answered at these times in seconds."""
        if self._skipped:
            self._skipped -= 1
            self._began = now
            return
        if self._began is None:
            self._began = sent_at
        self._texts += texts
        self._calls += 1
        # Whole rounds, because calls that were sent together end together.
        if self._calls >= -(-self._shortest // self.size) * self.size and now > self._began:
            rate, size = self._texts / (now - self._began), self.size
            self._end_window(rate)
            self._begin_window(size, now)

    def refused(self, sent_at: float, now: float) -> None:
        """Lowers the number of calls, once for all calls that were open at that time."""
        if sent_at >= self._lowered_at:
            self._kept, self._lowered_at = max(1.0, self.size * self.DECREASE), now
            self._trial, self._factors = None, [2.0]
            self._held_windows, self._hold, self._shortest = 0, self.FIRST_HOLD, 1
            self._begin_window(self.size, now)

    def _begin_window(self, open_calls: int, now: float) -> None:
        self._skipped = open_calls if self.size < open_calls else 0
        self._began, self._texts, self._calls = now, 0, 0

    def _end_window(self, rate: float) -> None:
        if self._trial is None:
            self._rate = rate
            self._held_windows = max(0, self._held_windows - 1)
        elif rate >= self._rate * self._least_change():
            self._kept, self._rate = self._trial, rate
        else:
            self._factors.pop()
        if not self._held_windows:
            self._try_next()

    def _least_change(self) -> float:
        """The least change of throughput, as a factor, with which the number on trial is kept."""
        assert self._trial is not None
        step = self._trial / self._kept
        return 1 + self.GAIN * (step - 1) if step > 1 else self.LOSS

    def _try_next(self) -> None:
        """Starts the next trial, or holds the number if none is left."""
        while self._factors:
            factor, has_refused = self._factors[-1], self._lowered_at > float("-inf")
            if factor < 1:
                other = min(self._kept * factor, int(self._kept) - 1)
            else:
                other = self._kept + 1 if has_refused else self._kept * factor
            self._trial = min(self._largest, max(1.0, other))
            if int(self._trial) != int(self._kept):
                return
            self._factors.pop()
        self._trial, self._factors = None, [2.0, 0.75]
        self._held_windows, self._shortest = self._hold, self.LONG
        self._hold = min(self.HOLD, 2 * self._hold)
