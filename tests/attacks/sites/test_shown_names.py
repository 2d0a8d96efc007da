"""What another party wrote forges no row of a screen that a person decides by, and no name of another
hospital; and a page of the web reads no figures.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.cli.join import confirm_looser
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.escapes import for_rows
from fedsurrogate.common.identity import unclear
from fedsurrogate.common.metrics_page import MachineCollector, is_named, serve_page
from fedsurrogate.common.security.documents import Proposal, SignedProposal
from fedsurrogate.common.security.enrolment import Enrolment
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.enrolment import standing
from tests.commands import coordinator, site
from tests.hostile_names import hostile_texts

KEY = ec.generate_private_key(ec.SECP384R1()).public_key()
WIDE = "\u6771" * 9
FORGED = st.lists(
    st.sampled_from(
        [" ", " " * 40, "\u3164" * 40, "\u2800" * 40, "digest    0f", "privacy", WIDE, "x" * 70]
    )
    | hostile_texts(),
    max_size=12,
).map("".join)


@given(FORGED, st.integers(24, 120))
def test_only_the_first_row_of_a_text_begins_like_one_of_ours(text: str, width: int) -> None:
    first, *others = for_rows("purpose   ", text, width).split("\n")
    assert first.startswith("purpose   ")
    assert all(each.startswith("        | ") for each in others)
    for row in (first[10:], *(each[10:] for each in others)):
        assert "  " not in row
        assert not set("\u3164\u2800\t\r") & set(row)
    cells = [len(each) if each.isascii() else 2 * len(each) for each in (first, *others)]
    assert max(cells) <= 2 * max(width, 20)
    assert all(len(each) <= max(width, 20) for each in (first, *others))


def test_a_purpose_forges_no_row_of_the_approvers_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blanks that fill a row of the terminal put what follows at the beginning of the next one."""
    monkeypatch.setenv("COLUMNS", "80")
    purpose = "a test" + " " * 64 + "digest    " + "0f" * 32 + " " * 6 + "privacy   epsilon 0.1"
    proposal = Proposal.fresh("run", {"epsilon": 0.0}, purpose, 3)
    (tmp_path / "p.json").write_text(SignedProposal(proposal).text())
    assert (
        coordinator(
            monkeypatch, "approval", "approve", tmp_path / "p.json", "--key", tmp_path / "none"
        )
        == 1
    )
    shown = capsys.readouterr().out
    rows = [line[at : at + 80] for line in shown.split("\n") for at in range(0, len(line), 80)]
    assert sum(each.startswith("digest ") for each in rows) == 1
    assert [each for each in rows if each.startswith("privacy ")] == ["privacy   NONE: epsilon = 0"]


def test_a_purpose_forges_no_row_of_an_officers_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as a row of the terminal, it needs no blanks to put what follows at the beginning of the
    next one. Which row that is depends on what stands before it, so all are tried.
    """
    monkeypatch.setenv("COLUMNS", "80")
    node = f"site=north data=imagefolder data-dir={tmp_path} state-dir={tmp_path}/state"
    forged = "approved by Dr. Grace: fedpft, epsilon 0.1, delta 1e-05"
    for filled in range(1, 90):
        proposal = Proposal.fresh("run", {"epsilon": 0.0}, "x" * filled + forged, 3)
        (tmp_path / "p.json").write_text(SignedProposal(proposal).text())
        command = ("approve", tmp_path / "p.json", "--officer", "Dr. Grace", "--node-config", node)
        assert site(monkeypatch, *command) == 0
        shown = capsys.readouterr().out
        rows = [line[at : at + 80] for line in shown.split("\n") for at in range(0, len(line), 80)]
        approved = [each for each in rows if each.startswith("approved by")]
        assert len(approved) == 1
        assert "no privacy" in approved[0]


@pytest.mark.parametrize("before", ["\\n", "x" * 30 + "\\n" * 3, "x" * 36, "x" * 200 + "\\r\\n"])
def test_a_policy_of_a_kit_forges_no_row_of_what_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    """The coordinator made the file; a person decides by what is shown of it."""
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "policy.toml"
    file.write_text(f'mechanisms = ["{before}  without-dp = false"]\nwithout-dp = true\n')
    own = {"site": "north", "data": "imagefolder", "policy": str(file)}
    own |= {f"{each}-dir": str(tmp_path / each) for each in ("data", "state", "check-log")}
    confirm_looser(parse_node_config(own), yes=True)
    shown = capsys.readouterr().out
    rows = [line[at : at + 80] for line in shown.split("\n") for at in range(0, len(line), 80)]
    said = [each for each in rows if each.strip().startswith("without-dp =")]
    assert said == ["  without-dp = true (was false)"]


HOSTILE = [
    *(
        "\u3164",
        "\u115f\u1160",
        "\u2800",
        "\u034f",
        "St. M\u0430ry",
        "St.\u00a0Mary",
        "St.  Mary",
        " St. Mary",
    ),
    *(
        "\uff33t. Mary",
        "<b>St. Mary</b>",
        "[bold]St. Mary",
        "`St. Mary`",
        "St. Mary | x",
        "**",
        "\u0301",
        "...",
    ),
    *(
        "\u0421\u0435\u043e\u0440",
        "\u0391\u0392",
        "St. Mary\u200b",
        "\u202eyraM .tS",
        "\ue000",
        "\ufb01n",
        "\u0131\u0585",
    ),
]
HONEST = [
    *(
        "St. Mary's (North) & Sons",
        "Universit\u00e4tsklinikum K\u00f6ln",
        "\u6771\u4eac\u5927\u5b66\u75c5\u9662",
    ),
    *(
        "\u0411\u043e\u043b\u044c\u043d\u0438\u0446\u0430 7",
        "\u0393\u03b5\u03bd\u03b9\u03ba\u03cc",
        "\u05d1\u05d9\u05ea \u05d7\u05d5\u05dc\u05d9\u05dd",
    ),
    *(
        "H\u00f4pital de l\u2019Est",
        "\u0905\u0938\u094d\u092a\u0924\u093e\u0932",
        "\uc11c\uc6b8\ub300\ubcd1\uc6d0",
    ),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hospitals_name_is_seen_and_like_no_other(name: str) -> None:
    with pytest.raises(ConfigError, match="hospital") as error:
        Enrolment("north", name, "it@north.example", KEY)
    assert str(error.value).isascii() or "none of" in str(error.value)


@pytest.mark.parametrize("name", HONEST)
def test_hospitals_of_all_countries_may_take_part(name: str) -> None:
    assert Enrolment("north", name, "it@north.example", KEY).hospital == name


@given(st.text(max_size=12))
def test_a_clear_name_has_a_shape_and_is_its_own_normal_form(name: str) -> None:
    if not unclear(name):
        assert name.isprintable()
        assert " ".join(name.split()) == name
        assert not set('<>[]{}|\\*_`#~"$') & set(name)


@pytest.mark.parametrize(
    ("known", "asked"), [("north1", "northl"), ("site0", "siteO"), ("a-b", "a_b"), ("ill", "I11")]
)
def test_a_site_name_that_looks_like_a_known_one_is_refused(
    tmp_path: Path, known: str, asked: str
) -> None:
    issue(tmp_path, ("fl.example.org",), (known,))
    asks = Enrolment(asked, "Hospital", "it@north.example", KEY)
    with pytest.raises(ConfigError, match="look alike"):
        standing(tmp_path, asks)


@pytest.mark.parametrize("own", ["exporter.example", "10.0.0.7", "::1"])
def test_only_the_whole_name_of_a_page_is_its_own(own: str) -> None:
    assert is_named("EXPORTER.example:9464", "exporter.example")
    for name in (
        f"evil{own}",
        f"evil.{own}",
        f"{own}.evil",
        f"evil-{own}.example",
        f"{own}@evil.x",
    ):
        assert not is_named(name, own)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200), ("[::1]:9464", 200), ("localhost", 200), ("exporter:9464", 200),
        ("10.0.0.7", 200), ("evil.example", 421), ("127.0.0.1.evil.example:9464", 421), ("localhost.", 421),
        ("[::1].evil.example", 421), ("evil.example:127.0.0.1", 421),
    ],
)  # fmt: skip
def test_a_page_of_the_web_reads_no_figures(host: str, status: int) -> None:
    """By a name of its own, which then leads to this machine."""
    with serve_page((MachineCollector((), {}),), "127.0.0.1", 0, False, "a test") as url:
        request = urllib.request.Request(url, headers={"Host": host})
        try:
            found = urllib.request.urlopen(request, timeout=20).status
        except urllib.error.HTTPError as error:
            found = error.code
    assert found == status
