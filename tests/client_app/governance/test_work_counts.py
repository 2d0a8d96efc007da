"""Limits on requests accumulate over all requests of a run, an hour and a day, whatever their
order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_app.governance import work_limits
from client_app.governance.work_limits import DAY, HOUR, WorkLimits, admit
from client_app.node_config import NodeConfig
from common.errors import PolicyError
from common.run import parse_run

LIMITS = WorkLimits(
    requests_per_run=3, requests_per_hour=5, extractions_per_day=2, most_seconds=2 * HOUR
)
SIZES = {size: parse_run({"image-size": size}) for size in (8, 16, 24)}
# Seconds since the request before, the run, and the size of its images.
REQUESTS = st.tuples(
    st.sampled_from([0.0, 60.0, 0.4 * HOUR, HOUR + 1, 3 * HOUR, DAY + 1]),
    st.sampled_from("abc"),
    st.sampled_from(sorted(SIZES)),
)


def allowed(earlier: Sequence[tuple[float, str, int]], now: float, run: str, size: int) -> bool:
    """Whether a request is within the limits, counted anew from all earlier admitted ones."""
    own = [at for at, name, _ in earlier if name == run]
    hour = [at for at, *_ in earlier if now - at < HOUR]
    latest = {made: at for at, _, made in earlier}
    day = {made for made, at in latest.items() if now - at < DAY} | {size}
    return (
        len(own) < LIMITS.requests_per_run
        and len(hour) < LIMITS.requests_per_hour
        and len(day) <= LIMITS.extractions_per_day
        and now - min(own, default=now) <= LIMITS.most_seconds
    )


@given(st.lists(REQUESTS, min_size=1, max_size=12))
def test_requests_are_admitted_as_if_all_earlier_ones_were_counted_anew(
    requests: list[tuple[float, str, int]],
) -> None:
    admitted: list[tuple[float, str, int]] = []
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        node, now = NodeConfig(state_dir=str(Path(name))), 1e9
        for later, run, size in requests:
            now += later
            patch.setattr(work_limits, "time", SimpleNamespace(time=lambda now=now: now))
            due = allowed(admitted, now, run, size)
            if due:
                admit(SIZES[size], node, LIMITS, run)
                admitted.append((now, run, size))
            else:
                with pytest.raises(PolicyError):
                    admit(SIZES[size], node, LIMITS, run)
