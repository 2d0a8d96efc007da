"""A simulation uses as many sites at the same time as fit, and is refused where none does."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.machine import MIB
from fedsurrogate.server_app.lifecycle import before_start
from fedsurrogate.server_app.lifecycle.before_start import (
    FLOWER_MIB,
    LOCAL_MIB,
    SITE_MIB,
    check_addresses,
    check_local,
    fitting_sites,
)
from tests.commands import coordinator


def have(monkeypatch: pytest.MonkeyPatch, mib: float, extra: float = 0.0) -> None:
    """Make so much memory available, and so much swap."""
    monkeypatch.setattr(
        before_start, "available_memory", lambda swap=False: int((mib + swap * extra) * MIB)
    )


@given(some.integers(1, 200), some.integers(0, 200_000))
def test_as_many_sites_run_as_fit_and_a_warning_says_so(wanted: int, mib: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        have(patch, mib)
        if mib < FLOWER_MIB + SITE_MIB:
            with pytest.raises(RunError):
                fitting_sites(wanted)
            return
        fit, warning = fitting_sites(wanted)
    assert 1 <= fit <= wanted
    assert FLOWER_MIB + fit * SITE_MIB <= mib
    assert fit == wanted or FLOWER_MIB + (fit + 1) * SITE_MIB > mib
    assert bool(warning) == (fit < wanted)
    assert not warning or f"{fit} of {wanted} sites" in warning


def test_one_site_may_use_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 1000, extra=1500)
    fit, warning = fitting_sites(8)
    assert fit == 1
    assert "1 of 8 sites" in warning


def test_too_little_memory_is_one_line_with_numbers_and_another_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    have(monkeypatch, 1300)
    assert coordinator(monkeypatch, "simulate", "--engine", "flower", "--sites", 5) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "1300 MiB",
        f"{FLOWER_MIB + SITE_MIB} MiB",
        "--engine local",
        f"about {LOCAL_MIB} MiB",
    ):
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_the_local_engine_is_refused_too_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, LOCAL_MIB)
    check_local()
    monkeypatch.setattr(
        before_start.psutil.Process, "memory_info", lambda self: type("", (), {"rss": 50 * MIB})
    )
    have(monkeypatch, LOCAL_MIB - 51)
    with pytest.raises(RunError, match=f"about {LOCAL_MIB} MiB"):
        check_local()


def test_few_addresses_are_refused_with_the_command_that_lifts_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_addresses()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**31, 2**31))
    with pytest.raises(RunError, match="`ulimit -v unlimited`"):
        check_addresses()
