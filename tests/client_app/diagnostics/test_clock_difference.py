"""By how much a clock is wrong, from signatures that a coordinator takes or refuses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.diagnostics.connection_checks import DAY, clock_behind
from fedsurrogate.common.flower.interface import Standing

SLACK = 300
"""Two windows of signatures: a difference nearer to a day than that may be found or not."""


def coordinator(behind: int) -> object:
    """A coordinator whose clock is so many seconds ahead of the site's, by Flower's rule."""

    def ask(ahead: float) -> Standing:
        return "registered" if -5 < behind - ahead < 305 else "clock"

    return ask


@given(behind=st.integers(-2 * DAY, -5) | st.integers(305, 2 * DAY))
def test_the_difference_is_found_to_the_second_within_a_day(behind: int) -> None:
    found = clock_behind(coordinator(behind))  # type: ignore[arg-type]
    if abs(behind) <= DAY - SLACK:
        assert found == behind
    elif abs(behind) > DAY + 2 * SLACK:
        assert found is None
    else:
        assert found in (None, behind)


def test_a_key_that_is_refused_at_any_date_tells_no_difference() -> None:
    assert clock_behind(lambda ahead: "clock") is None
