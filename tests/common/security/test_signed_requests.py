"""Requests in files: what was signed is what is read; everything else is refused with a reason."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, SealError
from fedsurrogate.common.methods.method import Method
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security import documents
from fedsurrogate.common.security.documents import (
    FIRST_LINE,
    LARGEST_REQUEST,
    MOST_SETTINGS,
    PURPOSE,
    Request,
    read_request,
)
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from tests.registry import CLASSES, SPECS, settings_of

KEY, OTHER = new_key(), new_key()
PUBLIC = public_key(KEY)
TEXTS = st.text(max_size=12)
SCALARS = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans())
LATER = f"{datetime.now(UTC).date() + timedelta(days=400):%Y-%m-%d}"
REQUESTS = st.builds(
    Request,
    id=st.text("0123456789abcdef", min_size=16, max_size=16),
    settings=st.dictionaries(TEXTS, SCALARS, max_size=5),
    centre=st.none() | st.binary(max_size=30),
    expires=st.sampled_from(["", LATER]),
    receipts=st.dictionaries(TEXTS, TEXTS, max_size=3),
)
SAME_FOLDER = [HealthCheck.function_scoped_fixture]


def written(folder: Path, content: bytes) -> Path:
    file = folder / "request"
    file.write_bytes(content)
    return file


def in_file(body: bytes, key: bytes = KEY, purpose: bytes = PURPOSE) -> bytes:
    return FIRST_LINE.encode() + sign(body, key, purpose).hex().encode() + b"\n" + body


@settings(max_examples=40, suppress_health_check=SAME_FOLDER)
@given(request=REQUESTS)
def test_a_site_reads_what_the_coordinator_signed(tmp_path: Path, request: Request) -> None:
    content = request.signed(KEY)
    assert content == request.signed(KEY), "the same request, the same bytes"
    assert content == in_file(request.body())
    assert read_request(written(tmp_path, content), PUBLIC) == request
    assert read_request(written(tmp_path, content), None).digest() == request.digest()


@settings(max_examples=150, suppress_health_check=SAME_FOLDER)
@given(request=REQUESTS, data=st.data())
def test_every_change_of_a_file_is_noticed(
    tmp_path: Path, request: Request, data: st.DataObject
) -> None:
    content = request.signed(KEY)
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "remove"]))
    changed = {
        "flip": content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :],
        "cut": content[:at],
        "insert": content[:at] + b"0" + content[at:],
        "remove": content[:at] + content[at + 1 :],
    }[kind]
    with pytest.raises((SealError, ConfigError)):
        read_request(written(tmp_path, changed), PUBLIC)


@settings(max_examples=20, suppress_health_check=SAME_FOLDER)
@given(request=REQUESTS, purpose=st.sampled_from([b"", b"list", b"requests", b"model"]))
def test_only_the_pinned_key_and_the_purpose_of_requests_count(
    tmp_path: Path, request: Request, purpose: bytes
) -> None:
    for content in (request.signed(OTHER), in_file(request.body(), purpose=purpose)):
        with pytest.raises(SealError, match="does not fit"):
            read_request(written(tmp_path, content), PUBLIC)


@settings(max_examples=40, suppress_health_check=SAME_FOLDER)
@given(request=REQUESTS, kind=st.sampled_from(range(6)))
def test_a_signed_body_in_another_form_is_refused(
    tmp_path: Path, request: Request, kind: int
) -> None:
    """A coordinator that signs what two readers read differently could show each another run."""
    body = request.body()
    content = json.loads(body)
    forms = [
        json.dumps(content, sort_keys=True).encode(),
        json.dumps(dict(reversed(content.items())), indent=2).encode() + b"\n",
        body.replace(b'"id"', b'"id": "0000000000000000",\n  "id"', 1),
        json.dumps(content | {"more": 1}, indent=2, sort_keys=True).encode() + b"\n",
        json.dumps({k: v for k, v in content.items() if k != "expires"}, indent=2, sort_keys=True).encode() + b"\n",
        json.dumps([content]).encode(),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no request"):
        read_request(written(tmp_path, in_file(forms[kind])), PUBLIC)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, suppress_health_check=SAME_FOLDER)
@given(
    request=REQUESTS,
    field=st.sampled_from(sorted(json.loads(Request("0" * 16, {}, None).body()))),
    value=JSON,
)
def test_any_value_of_any_field_is_read_as_it_was_signed_or_refused_in_one_way(
    tmp_path: Path, request: Request, field: str, value: Any
) -> None:
    content = json.loads(request.body()) | {field: value}
    body = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    try:
        read = read_request(written(tmp_path, in_file(body)), PUBLIC)
    except ConfigError as error:
        assert "no request" in str(error) or "expired" in str(error)  # noqa: PT017
    else:
        assert read.body() == body


@pytest.mark.parametrize("days", [-400, -2, -1, 0, 1, 400])
def test_a_request_is_answered_to_the_end_of_its_last_day(
    tmp_path: Path, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 3, 31, 23, 59, 59, tzinfo=tz)

    monkeypatch.setattr(documents, "datetime", Clock)
    last = f"{datetime(2026, 3, 31) + timedelta(days=days):%Y-%m-%d}"
    file = written(tmp_path, Request("0" * 16, {}, None, last).signed(KEY))
    assert read_request(file, None).expires == last, "the coordinator reads its own file later"
    if days >= 0:
        assert read_request(file, PUBLIC).expires == last
    else:
        with pytest.raises(ConfigError, match="expired"):
            read_request(file, PUBLIC)
    fresh = Request.fresh({}, None, days) if days > 0 else Request.fresh({}, None)
    assert fresh.expires == (last if days > 0 else "")


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_a_request_is_of_a_run_in_which_a_site_sends_one_message_alone(
    spec: Method, secure: bool
) -> None:
    flat = settings_of(spec) | {"secure-aggregation": secure, "classes": CLASSES}
    try:
        run = parse_run(flat)
    except ConfigError:
        assert secure, "the method has no secure aggregation"
        return
    once = run.plan.kind == "one-shot" and run.plan.releases_once
    if once and run.plan.combination.stored:
        assert Request.fresh(flat, None).run().full_digest == run.full_digest
        return
    with pytest.raises(ConfigError, match="exchange"):
        Request.fresh(flat, None)


@pytest.mark.parametrize("projection", [None, "auto", ""])
@pytest.mark.parametrize("method", ["fedpft", "average"])
@pytest.mark.parametrize("budget", [{}, {"epsilon": 1.0, "delta": 1e-5}])
def test_sites_answer_the_run_that_was_asked_for_and_earlier_ones_read_what_they_know(
    method: str, projection: str | None, budget: dict[str, Any]
) -> None:
    key = documents.PROJECTION
    asked = {"method": method, "classes": CLASSES, **budget}
    asked |= {} if projection is None else {key: projection}
    try:
        run = parse_run(asked)
    except ConfigError:
        assert budget, "the method adds noise in secure aggregation only"
        return
    made = Request.fresh(asked, None)
    assert made.run().full_digest == run.full_digest
    assert made.run().plan.mean_over_columns == run.plan.mean_over_columns
    # A site of an earlier version refuses a name that it does not know, where its answer would
    # have another meaning.
    assert (key in made.settings) == (run.plan.mean_over_columns or projection == "auto")


def test_fresh_requests_have_ids_of_their_own() -> None:
    assert len({Request.fresh({}, None).id for _ in range(20)}) == 20


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.sampled_from([0, None, "", "0" * 15, "0" * 17, "A" * 16, "0" * 16 + "\n"]),
            "expires": st.sampled_from([0, None, "2026-02-30", "2026-3-01", "tomorrow", "20260301", LATER + "\n"]),
            "settings": st.sampled_from([None, [], {"a": None}, {"a": [1]}, {"a": 1, "b": {}}]),
            "receipts": st.sampled_from([None, [], "a", {"a": 1}, {1: "a"}, {"a": "b", "c": None}]),
        },
    ).filter(bool)
)  # fmt: skip
def test_a_value_of_another_type_is_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"id": "0" * 16, "settings": {}, "centre": None}
    Request(**right)
    with pytest.raises(ConfigError):
        Request(**(right | wrong))


@pytest.mark.parametrize("more", [0, 1])
def test_the_number_of_settings_and_the_size_are_limited_exactly(tmp_path: Path, more: int) -> None:
    many = {f"{at}": at for at in range(MOST_SETTINGS + more)}
    empty = Request("0" * 16, {"a": ""}, None)
    room = LARGEST_REQUEST - len(empty.signed(KEY))
    full = Request("0" * 16, {"a": "x" * (room + more)}, None)
    if not more:
        assert Request("0" * 16, many, None).settings == many
        assert read_request(written(tmp_path, full.signed(KEY)), PUBLIC) == full
        return
    with pytest.raises(ConfigError, match="at most 1000"):
        Request("0" * 16, many, None)
    with pytest.raises(ConfigError, match="sites read at most"):
        full.signed(KEY)
    with pytest.raises(ConfigError, match="larger than"):
        read_request(written(tmp_path, in_file(full.body())), PUBLIC)


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.*cannot be read"):
        read_request(tmp_path / "nothing", PUBLIC)
