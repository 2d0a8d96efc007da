"""The progress of a run in words: steps, time left, bytes a step; sizes and times with units."""

from typing import Any

import pytest

from fedsurrogate.server_app.monitoring.watch import Progress, progress_line
from fedsurrogate.server_app.runs.state import RunState, event_line, state_of, when


def event(second: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "time": f"2026-01-01T00:{int(second) // 60:02}:{second % 60:06.3f}+00:00",
        "event": kind,
    } | fields


def training(
    done: int, rounds: int = 30, seconds: float = 4.0, start: int = 0
) -> list[dict[str, Any]]:
    """Events of a run in rounds; each takes `seconds`, and two sites send 600 kB each. Bytes of a
    site are those of this run alone if it was resumed after round `start`.
    """
    events = [event(0, "configured", method="fedavg", rounds=rounds), event(10, "invited", sites=2)]
    if start:
        events.append(event(20, "resumed", round=start))
    for index in range(start + 1, done + 1):
        at = (20 if start else 10) + seconds * (index - start)
        events += [
            event(at, "replied", site=name, round=index, bytes=600_000 * (index - start))
            for name in ("a", "b")
        ]
        events.append(event(at, "round", round=index, accuracy=0.5, bytes_up=1_200_000 * index))
    return events


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (training(0), "round 0 of 30 done"),
        (training(3), "round 3 of 30 done, 1 min 48 s left; 1.2 MB a round"),
        (training(27), "round 27 of 30 done, 12 s left; 1.2 MB a round"),
        (training(30), "round 30 of 30 done; 1.2 MB a round"),
        # A continued run is as fast as its rounds since then.
        (training(28, start=26), "round 28 of 30 done, 8 s left; 1.2 MB a round"),
        (
            [event(0, "configured", method="fedpft"), event(1, "invited", sites=2)],
            "round 0 of 1 done",
        ),
    ],
)
def test_the_line_has_steps_time_left_and_bytes(events: list[dict[str, Any]], line: str) -> None:
    assert progress_line(state_of(events)) == line


def test_the_time_left_runs_down_between_rounds_and_is_never_negative() -> None:
    state = state_of(training(27))
    for second, left in ((118, 12.0), (123, 7.0), (200, 0.0)):
        assert state.seconds_left(when(event(second, "now"))) == pytest.approx(left)
    assert RunState().seconds_left() is None


def test_the_end_of_a_round_is_shown_with_the_progress_and_nothing_else_is() -> None:
    progress = Progress()
    lines = [progress.line(each) for each in training(2)]
    assert [line.partition("; ")[2] for line in lines if "; " in line] == [
        "round 1 of 30 done, 1 min 56 s left; 1.2 MB a round",
        "round 2 of 30 done, 1 min 52 s left; 1.2 MB a round",
    ]
    assert progress.status == "round 2 of 30 done, 1 min 52 s left; 1.2 MB a round"


def test_sizes_times_and_shares_of_events_have_units() -> None:
    line = event_line(
        event(
            1, "replied", site="a", bytes=184_320, payload=1_820_000, seconds=125.0, accuracy=0.684
        )
    )
    assert (
        line
        == "00:00:01 replied site=a bytes=184 kB payload=1.82 MB seconds=2 min 5 s accuracy=68.4%"
    )
    assert event_line(event(1, "compared", model=0.5, oracle=0.75)).endswith(
        "compared model=50.0% oracle=75.0%"
    )
    assert event_line(event(1, "replied", bytes="many", seconds=None)).endswith(
        "bytes=many seconds=None"
    )


def test_one_cause_of_many_sites_is_written_once_and_counted_at_the_end() -> None:
    """Sites of another cause keep their own, and a site's name may look like one."""
    cause, other = "none of the 60 images of 'imagefolder' can be read", "no reply" + " at all" * 9
    causes = {"0": cause, "as site 0": cause, "2": other, "3": cause, "4": "gone"}
    progress = Progress()
    lines = [
        progress.line(event(1, "rejected", site=name, reason=why)) for name, why in causes.items()
    ]
    failed = event(2, "failed", reason=f"quorum missed: 0 of 5; 3 of them: {cause}")
    lines.append(progress.line(failed))
    assert [line.partition("reason=")[2] for line in lines] == [
        cause,
        "as site 0",
        other,
        "as site 0",
        "gone",
        "quorum missed: 0 of 5; 3 of them: as site 0",
    ]
    assert failed["reason"].endswith(cause)
