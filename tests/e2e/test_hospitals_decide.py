"""Three hospitals make their own keys and enrol. A run needs a second person's signature, and an
officer at each hospital decides; the coordinator's audit log has what was done.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.audit_log import APPROVERS, NAME, RULES, entries
from tests.children import ok, refused
from tests.e2e.hospitals import CLASSES, Hospital
from tests.e2e.processes import Federation, coordinator, events, federation, site_command

NAMES = ("north", "south", "west")
POLICY = (
    "epsilon-per-run = 8.0\nepsilon-total = 16.0\nrequire-approval = 1\nrequire-officer = true\n"
)
SETTINGS = (
    f'classes="{CLASSES}" epsilon=1.0 delta=1e-5 fedpft.covariance="spherical" sites=3 '
    "quorum=0.5 deadline=600.0"
)


def typed(*arguments: str, cwd: Path) -> str:
    return ok(coordinator(*arguments, cwd=cwd)).stdout


def enrol(home: Path, name: str) -> None:
    """What two people do, with a telephone."""
    words = ["--hospital", name.title(), "--contact", f"it@{name}.example"]
    done = site_command("enrol", name, *words, "--out", str(home / "kits" / name))
    said = re.search(r"fingerprint +([0-9a-f ]{39})", done.stdout)
    assert said, done.stderr
    request = str(home / "kits" / name / f"{name}.csr")
    typed(
        *("sites", "accept", request, "--folder", "certificates", "--fingerprint", said.group(1)),
        *("--coordinator", "127.0.0.1:9092", "--out", f"{name}.tar.gz"),
        cwd=home,
    )
    with tarfile.open(home / f"{name}.tar.gz") as kit:
        assert not [each for each in kit.getnames() if each.endswith(".key")]
        kit.extractall(home / "unpacked", filter="data")
    for file in (home / "unpacked" / name / "certificates").iterdir():
        shutil.copy(file, home / "kits" / name / "certificates")
    (home / "kits" / name / "certificates").rename(home / "credentials" / name)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("decide")
    (home / "credentials").mkdir()
    typed("sites", "certs", "certificates", "--host", "127.0.0.1", cwd=home)
    for name in NAMES:
        enrol(home, name)
    line = typed("approval", "key", "ada.key", "--name", "Ada", cwd=home)
    (home / "certificates" / APPROVERS).write_text(line)
    return home


@pytest.fixture(scope="module")
def hospitals(home: Path) -> dict[str, Hospital]:
    made = {name: Hospital(home, name, seed) for seed, name in enumerate(NAMES)}
    for each in made.values():
        each.policy_file.write_text(POLICY)
        shutil.copy(home / "certificates" / APPROVERS, each.home)
    return made


@pytest.fixture(scope="module")
def running(home: Path, hospitals: dict[str, Hospital]) -> Iterator[Federation]:
    nodes = [each.node_config for each in hospitals.values()]
    with federation(
        home / "flower", nodes, home / "certificates", names=NAMES, kits=home / "credentials"
    ) as found:
        # From here on a second signature is needed.
        (home / "certificates" / RULES).write_text("approvals = 1\n")
        yield found


def test_a_run_is_what_people_have_allowed_and_each_hospital_decides(
    home: Path, hospitals: dict[str, Hospital], running: Federation
) -> None:
    proposal = str(home / "spring.json")
    typed(
        "approval",
        "propose",
        proposal,
        "--purpose",
        "cats and dogs, spring",
        "-c",
        SETTINGS,
        cwd=home,
    )
    run = ["run", "--proposal", proposal, *running.control]

    refused(
        coordinator("run", "-c", SETTINGS, *running.control, cwd=home),
        "approvals = 1, so this needs a proposal",
    )
    unsigned = coordinator(*run, cwd=home)
    assert "has 0 signatures of the 1 people" in unsigned.stderr

    shown = typed("approval", "approve", proposal, "--key", "ada.key", "--yes", cwd=home)
    assert "cats and dogs, spring" in shown
    assert "epsilon 1, delta 1e-05" in shown
    other = coordinator(*run, "-c", "epsilon=2.0", cwd=home)
    assert "allows something else" in other.stderr

    for name, more in (("north", []), ("south", []), ("west", ["--refuse"])):
        node = ["--node-config", hospitals[name].node_config]
        ok(site_command("approve", proposal, "--officer", f"Dr. {name}", *node, *more))
    done = ok(coordinator(*run, cwd=home))
    folder = Path(done.stdout.splitlines()[-1])
    card = json.loads((folder / "metrics.json").read_text())["card"]
    assert card["used"] == ["north", "south"]
    assert card["rejected"] == {"west": "the site's policy does not allow what was asked"}

    # No working time and no number of correct records: these would be exact numbers on the data.
    assert json.loads((folder / "metrics.json").read_text())["accuracy"] == {"per_site": {}}
    assert not any(event.get("seconds") for event in events(folder.parent, "replied"))
    for name in ("north", "south"):
        (charge,) = hospitals[name].charges()
        assert charge["allowed_by"] == f"Ada, here Dr. {name}"
        assert charge["bytes"] == (folder / "surrogates" / f"{name}.pb").stat().st_size
        ledger = site_command("ledger", "show", "--node-config", hospitals[name].node_config)
        assert "Ada" in ledger.stdout
    assert hospitals["west"].charges() == []

    # Once allowed is once: the same proposal pays for no second run.
    again = coordinator(*run, cwd=home)
    assert again.returncode == 1
    assert [len(each.charges()) for each in hospitals.values()] == [1, 1, 0]


def test_a_run_that_another_program_submits_needs_the_signatures_too(
    home: Path, hospitals: dict[str, Hospital], running: Federation
) -> None:
    before = [len(each.charges()) for each in hospitals.values()]
    settings = f'{SETTINGS} seed=5 output-dir="{home}/runs"'
    assert parse_overrides([settings])["seed"] == 5
    assert running.run(settings, cwd=home) == "finished:failed"
    assert [len(each.charges()) for each in hospitals.values()] == before


def test_who_is_in_changes_only_with_a_signature(home: Path, running: Federation) -> None:
    command = ["sites", "unregister", "certificates", "west", *running.control]
    refused(coordinator(*command, cwd=home), "approvals = 1")
    what = ["--what", "unregister", "--folder", "certificates", "--site", "west"]
    typed("approval", "propose", "leave.json", "--purpose", "west leaves", *what, cwd=home)
    typed("approval", "approve", "leave.json", "--key", "ada.key", "--yes", cwd=home)
    wrong = coordinator(
        *(
            "sites", "unregister", "certificates", "south", *running.control, "--proposal",
            "leave.json",
        ),
        cwd=home,
    )  # fmt: skip
    assert "allows something else" in wrong.stderr
    assert "unregistered  west" in typed(*command, "--proposal", "leave.json", cwd=home)


def test_the_audit_log_has_what_was_done_and_shows_a_changed_line(home: Path) -> None:
    """After the tests above."""
    shown = typed("approval", "log", "certificates", "--verify", cwd=home)
    assert "whole" in shown
    file = home / "certificates" / NAME
    done = [entry["action"] for entry, _ in entries(file)]
    assert done[:5] == ["certify", "accept", "accept", "accept", "register"]
    run = ["start", "submit", "end"]
    # Another program submits once, and says neither that it starts nor how it ended.
    assert done[5:] == run * 2 + ["submit", "revoke"]
    started = [entry["facts"] for entry, _ in entries(file) if entry["action"] == "start"]
    assert all(each["proposal"] for each in started)
    honest = file.read_bytes()
    file.write_bytes(honest.replace(b'"north"', b'"n0rth"', 1))
    refused(
        coordinator("approval", "log", "certificates", "--verify", cwd=home),
        "a line was changed, removed or inserted",
    )
    file.write_bytes(honest)
