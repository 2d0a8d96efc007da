import sys

import pytest

from fedsurrogate.common.command_line import new_app, run_command
from fedsurrogate.common.errors import ConfigError


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
