"""Deadlines of tests, which are longer on a busy machine."""

from __future__ import annotations

import time


def _stretch() -> float:
    """How many times longer deadlines are than on an idle machine: a third of what a nap and some work take longer."""
    worked = took = 0.0
    for _ in range(5):
        due = time.monotonic() + 0.005
        time.sleep(0.005)
        begin = time.thread_time()
        while time.thread_time() - begin < 0.004:
            pass
        worked += time.thread_time() - begin
        took += time.monotonic() - due
    return min(max(took / worked / 3, 1.0), 30.0)


_STRETCH = _stretch()


def stretched(seconds: float) -> float:
    """As many seconds on an idle machine, and more on a busy one."""
    return seconds * _STRETCH


#: Seconds that nothing here takes unless it hangs.
LONG = stretched(60.0)
