"""What a person sees of a command: its first line, lines with what is left, and errors."""

import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common import logs
from fedsurrogate.common.command_line import new_app, run_command, stderr_console
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.logs import counted


@given(
    counts=st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([0.5, 5.0, 9.5, 10.0, 25.0])), max_size=8
    ),
    done=st.sampled_from([None, 0, 30]),
    total=st.sampled_from([100, 400]),
    what=st.sampled_from([None, "images"]),
    of_a_command=st.booleans(),
)
def test_a_line_every_ten_seconds_has_the_rate_and_the_time_that_is_left(
    counts: list[tuple[int, float]],
    done: int | None,
    total: int,
    what: str | None,
    of_a_command: bool,
) -> None:
    """In the log; of a command a person sees it as well."""
    with pytest.MonkeyPatch.context() as patch:
        clock, lines, seen = [100.0], list[str](), list[str]()
        patch.setattr(logs, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        patch.setattr(logs.LOG, "info", lambda text, *words: lines.append(text % words))
        patch.setattr(type(stderr_console()), "is_terminal", False)
        patch.setattr(stderr_console(), "print", lambda text, **_: seen.append(text))
        flag = threading.Event()
        patch.setattr(logs, "of_a_command", flag)
        if of_a_command:
            flag.set()
        more = {} if done is None else {"done": done}
        named = {} if what is None else {"what": what}
        expected, finished, reported = [], done or 0, 100.0
        with counted("north", total, **more, **named) as advance:  # type: ignore[arg-type]
            for count, seconds in counts:
                clock[0] += seconds
                finished += count
                advance(count)
                if clock[0] - reported >= 10:
                    reported = clock[0]
                    rate = (finished - (done or 0)) / (clock[0] - 100)
                    left = (total - finished) / max(rate, 1e-9)
                    expected.append(
                        f"north: {finished} of {total} {what or 'records'}, {rate:.0f} "
                        f"{what or 'records'}/s, {left:.0f} s left"
                    )
        assert lines == expected
        assert seen == (expected if of_a_command else [])


def test_an_expected_error_is_one_line_on_stderr_as_it_is_written_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app, text = new_app("help"), f"site = 'a[red]b :warning:' {'x' * 300}"

    @app.command()
    def fail() -> None:
        raise ConfigError(text)

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit) as end:
        run_command(app)
    assert end.value.code == 1
    assert capsys.readouterr() == ("", f"error: {text}\n")


def test_a_programming_error_is_not_taken_for_an_expected_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = new_app("help")

    @app.command()
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(ZeroDivisionError):
        run_command(app)
