"""What is written and decided by the time is the same wherever a clock stands: days of others, hours that
summer time leaves out or has twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.governance import ledger
from fedsurrogate.client_app.governance.budget import events_of
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.message_files import MessageRequest
from fedsurrogate.common.security.documents import Proposal, Request, read_request
from fedsurrogate.common.security.registrations import Registration
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.server_app.deployment import audit_log
from fedsurrogate.server_app.deployment.certificates import BEFORE, issue
from tests.client_app.governance.ledger_processes import TOTAL, release

# As POSIX writes them, without files of zones: at any moment, the day of one of the first two is not
# that of UTC.
ZONES = {
    "east": "<+14>-14",
    "west": "<-12>12",
    "Nepal": "<+0545>-5:45",
    "Berlin": "CET-1CEST,M3.5.0,M10.5.0/3",
    "none": "UTC0",
}


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the zone of this machine."""

    def there(zone: str) -> None:
        monkeypatch.setenv("TZ", ZONES[zone])
        time.tzset()

    yield there
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest, stand: Callable[[str], None]) -> str:
    stand(request.param)
    return str(request.param)


def today() -> date:
    return datetime.now(UTC).date()


@pytest.mark.usefixtures("zone")
def test_a_last_day_is_one_of_utc_for_who_sets_it_and_who_reads_it(tmp_path: Path) -> None:
    before, after = today(), today()
    assert Proposal.fresh("run", {"method": "fedpft"}, "a test", 3).expires in {
        str(each + timedelta(3)) for each in (before, after)
    }
    private, file = new_key(), tmp_path / "request"
    request = Request.fresh({"method": "fedpft"}, None, 1)
    for day, over in ((today(), False), (today() + timedelta(-1), True)):
        message = MessageRequest("0" * 64, "7", "north", "train", {}, {}, str(day))
        assert message.expired() == over
        file.write_bytes(replace(request, expires=str(day)).signed(private))
        if over:
            with pytest.raises(ConfigError, match="expired on"):
                read_request(file, public_key(private))
        else:
            assert read_request(file, public_key(private)).expires == str(day)


@pytest.mark.usefixtures("zone")
def test_what_is_written_down_has_the_moment_with_its_zone(tmp_path: Path) -> None:
    own = ledger.Ledger(tmp_path, "data")
    began = time.time()
    own.charge(release(), TOTAL)
    audit_log.note(tmp_path, "accept", {"site": "north"})
    ((entry, _),) = audit_log.entries(tmp_path / audit_log.NAME)
    for text in (own.entries()[-1]["time"], entry["time"]):
        written = datetime.fromisoformat(text)
        assert written.tzinfo is not None
        assert began - 1 <= written.timestamp() <= time.time() + 1
    assert events_of(own.entries())


@pytest.mark.usefixtures("zone")
def test_a_new_certificate_begins_now(tmp_path: Path) -> None:
    issue(tmp_path, ("fl.example.org",), ("north",))
    made = [x509.load_pem_x509_certificate(each.read_bytes()) for each in tmp_path.glob("*.crt")]
    assert made
    for each in made:
        began = each.not_valid_before_utc + BEFORE
        assert abs(datetime.now(UTC) - began) < timedelta(hours=1)


@pytest.mark.usefixtures("zone")
@given(hours=st.floats(-30, 30), offset=st.integers(-14, 14))
def test_a_key_is_over_at_its_moment_however_that_is_written(hours: float, offset: int) -> None:
    now = datetime.now(UTC)
    ends = (now + timedelta(hours=hours)).astimezone(timezone(timedelta(hours=offset)))
    assert Registration("key", 1, ends.isoformat()).expired(now) == (ends <= now)
