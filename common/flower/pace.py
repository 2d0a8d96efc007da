"""How long a process waits between two looks for work: briefly while there is work, longer at rest."""

from __future__ import annotations

import time

SHARE = 0.1
"""A wait as a share of the time since the last work."""
HERE, REMOTE = 0.02, 0.1
"""Shortest waits in seconds: to a process of the same machine, and to a SuperLink of many sites."""


class Pace:
    """Waits a tenth of the time since the last work.

    Args:
        shortest: Seconds that a wait takes at least.

    Example:
        >>> pace = Pace(HERE)
        >>> pace.seconds(3.0)
        0.02
    """

    def __init__(self, shortest: float) -> None:
        self._shortest, self._last = shortest, time.monotonic()

    def worked(self) -> None:
        """There was work just now."""
        self._last = time.monotonic()

    def seconds(self, longest: float) -> float:
        """Seconds to wait now, at most `longest`."""
        since = time.monotonic() - self._last
        return min(longest, max(self._shortest, SHARE * since))

    def sleep(self, longest: float) -> None:
        """Wait; in place of a `time.sleep` of `longest` seconds."""
        time.sleep(self.seconds(longest))
