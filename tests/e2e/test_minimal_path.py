"""The path that the guides show, typed at terminals: a coordinator and three hospitals, from nothing
to a finished run and its ledgers. Nothing is set by hand but what is asked.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedsurrogate.client_app.diagnostics.site_checks import check_isolation
from fedsurrogate.client_app.processes.own_account import own_folder
from fedsurrogate.server_app.deployment.submit import stop_process
from tests.deploy.test_compose import DEPLOY
from tests.documents import commands
from tests.e2e.processes import BIN, environment, free_ports, listens, until
from tests.terminals import Terminal

pytestmark = pytest.mark.slow
NAMES = ("north", "south", "west")
SETTINGS = 'sites=3 epsilon=1.0 delta=1e-5 classes="even,odd" image-size=8 deadline=600.0'


def write_images(folder: Path, number: int) -> None:
    """A third of the digits, in a folder for each class."""
    digits = load_digits()
    for row in range(number, 600, 3):
        place = folder / ("even", "odd")[digits.target[row] % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype("uint8")).save(place / f"{row}.png")


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder, and the environment of all who type."""
    home = tmp_path_factory.mktemp("path")
    with own_folder() as sockets:
        control = f"unix:{sockets}/control:9093"
        yield home, environment(home) | {"FEDSURROGATE_CONTROL": control}


def test_three_commands_join_and_three_run(typed: tuple[Path, dict[str, str]]) -> None:
    home, own = typed
    (port,) = free_ports(1)
    hospital = [line.partition(" #")[0].strip() for line in commands(DEPLOY / "kit/README.md")[0]]
    assert hospital == ["site enrol north", "tar xzf north.tar.gz", "site join north/"]
    with ExitStack() as running:

        def start(folder: Path, *words: str) -> Terminal:
            terminal = Terminal(words, folder, own)
            running.callback(stop_process, terminal.process.pid)
            return terminal

        init = start(home, "coordinator", "init", "our federation", "--port", str(port))
        assert init.answer([("reach this machine", "127.0.0.1")]).ended() == 0
        federation = home / "our federation"
        # Typed as it is shown, with the blank in the folder's name.
        first = re.search(r"start it: (.*), or docker", init.shown)
        accept = re.search(r"let a hospital in: (.*)REQUEST", init.shown)
        assert first
        assert accept
        start(home, "sh", "-c", first[1].replace("coordinator", str(BIN / "coordinator")))
        until(lambda: listens(own["FEDSURROGATE_CONTROL"]))
        # A test beside this one may have a SuperNode that starts what runs bring, which the doctor refuses.
        until(lambda: check_isolation().state != "FAIL")

        joined = []
        for number, name in enumerate(NAMES):
            (place := home / f"hospital-{name}").mkdir()
            write_images(place / "images", number)
            enrol, unpack, join = (line.replace("north", name) for line in hospital)
            asked = start(place, *enrol.split())
            asked.answer([("The hospital's name", "St. Mary"), ("e-mail", "it@mary.example")])
            assert asked.ended() == 0
            said = re.search(r"fingerprint +([0-9a-f ]{39})", asked.shown)
            assert said
            shown = re.search(
                r"\n +(tar xzf \S+) +the first time; then: (site join \S+)", asked.shown
            )
            assert shown
            assert (shown[1], f"{shown[2].rstrip()}/") == (unpack, join)
            shutil.copy(place / name / f"{name}.csr", federation)
            accepts = start(federation, *accept[1].split(), f"{name}.csr")
            accepts.until("read out")
            assert said[1] not in accepts.shown, "it must come from the hospital"
            accepts.type(said[1])
            assert accepts.ended() == 0, accepts.shown
            shutil.move(federation / f"{name}.tar.gz", place)
            subprocess.run(unpack.split(), cwd=place, check=True)
            if name == "west":
                # As a script does: two edited files, and no question.
                settings = place / name / ".env"
                settings.write_text(settings.read_text().replace("DATA=\n", "DATA=../images\n"))
                joined.append(start(place, *join.split(), "--yes"))
                continue
            joined.append(start(place, *join.split()))
            answers = {"Folder of the data": "images", "Their kind": "", "weights": ""}
            answers |= {"one run": "1.5", "together": "6"}
            joined[-1].answer(list(answers.items()))
        for each in joined[:2]:
            # Their limits are larger than the default: that is said before it is in force.
            each.answer([("Are these all", "y")])
            each.until("epsilon-total = 6 (was 4)")
            each.until("cannot be taken back")
            each.answer([("Let it be in force", "y"), ("Open the ledger", "y")])
        for each in joined:
            each.until("connected; only the code installed here runs")
        assert check_isolation().state == "PASS"

        checked = start(federation, "coordinator", "run", "--check", "-c", SETTINGS)
        assert checked.ended() == 0, checked.shown
        assert len(re.findall(r"(?:north|south|west) .* yes ", checked.shown)) == 3
        ran = start(federation, "coordinator", "run", "-c", SETTINGS)
        assert ran.ended() == 0, ran.shown
        assert "finished:completed, 3 of 3 sites used" in ran.shown
        for each in joined:
            each.process.send_signal(signal.SIGINT)
            assert each.ended() == 0, each.shown
        for name in NAMES:
            ledger = start(
                home, "site", "ledger", "show", "--node-config", f"hospital-{name}/{name}"
            )
            assert ledger.ended() == 0
            # Once: the check was free.
            total = 4 if name == "west" else 6
            ledger.until(f"spent epsilon 1 of {total} at delta 1e-05")
        for name in NAMES:
            assert "CLASSES=even,odd\n" in (home / f"hospital-{name}" / name / ".env").read_text()
        # It has been answered: nothing is asked again, here without a terminal.
        doctor = start(home, "site", "doctor", "hospital-north/north")
        assert doctor.ended() == 0, doctor.shown
