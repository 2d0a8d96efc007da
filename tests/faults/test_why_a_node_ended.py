"""A node that cannot take part says the true cause, as an operator meets it: a second machine with the
same kit, another coordinator's authority, a clock that is wrong, a certificate that has ended.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsurrogate.client_app.processes.supervisor import TWIN
from fedsurrogate.server_app.deployment.certificates import issue
from fedsurrogate.server_app.deployment.submit import APP_FOLDER, stop_process
from tests.children import ran
from tests.e2e.processes import Federation, environment, federation, ready

pytestmark = pytest.mark.faults
NODE = 'site="{0}" data="digits" partition-id={0} num-partitions=2 state-dir="{1}/{0}"'
SECONDS = 240.0


def moves_the_clock() -> bool:
    """Whether faketime works: without its library it starts a program with the true time."""
    if shutil.which("faketime") is None:
        return False
    command = ["faketime", "-f", "+3000d", sys.executable, "-c", "import time; print(time.time())"]
    done = ran(command)
    return done.returncode == 0 and float(done.stdout) > time.time() + 2000 * 86400


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A SuperLink that knows the keys of the sites 0 and 1, of which 0 is connected."""
    home = tmp_path_factory.mktemp("ended")
    issue(home / "certificates", ("127.0.0.1",), ("0", "1"))
    with federation(home / "flower", [NODE.format(0, home)], home / "certificates") as found:
        yield found


def said(running: Federation, site: str, *, authority: Path | None = None, clock: str = "") -> str:
    """What `site node` prints until it has ended once and named a cause."""
    with tempfile.TemporaryDirectory() as place, ready(f"unix:{place}/app"):
        command = [
            *(["faketime", "-f", clock] if clock else []),
            sys.executable, "-m", "fedsurrogate.client_app.cli.main", "node", "--retry", "1",
            "--runtime", f"unix:{place}/app", "--superlink", running.fleet,
            *running.credentials(site), "--node-config", NODE.format(site, place),
        ]  # fmt: skip
        if authority is not None:
            command[command.index("--root-certificates") + 1] = str(authority)
        log = Path(place, "log")
        known = environment(Path(place)) | {"PYTHONPATH": str(APP_FOLDER)}
        with log.open("w") as output:
            process = subprocess.Popen(command, env=known, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + SECONDS
            while "the SuperNode has ended" not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                assert process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.5)
        finally:
            stop_process(process.pid)
        return next(
            line for line in log.read_text().splitlines() if "the SuperNode has ended" in line
        )


def test_a_second_machine_with_the_same_kit_reads_that_its_key_is_in_use(
    running: Federation,
) -> None:
    assert TWIN in said(running, "0")


def test_a_wrong_authority_is_a_wrong_authority_and_no_refused_key(
    running: Federation, tmp_path: Path
) -> None:
    issue(tmp_path / "other", ("127.0.0.1",), ())
    line = said(running, "1", authority=tmp_path / "other" / "ca.crt")
    assert "TLS" in line
    assert "key" not in line.partition("TLS")[0]
    assert TWIN not in line


@pytest.mark.skipif(not moves_the_clock(), reason="needs faketime, with its library")
@pytest.mark.parametrize(
    ("clock", "cause"),
    [
        ("+2h", "2 h ahead of the coordinator's"),
        ("-2h", "2 h behind the coordinator's"),
        ("+3000d", "expired"),
        ("-400d", "not yet valid"),
    ],
)
def test_a_wrong_clock_and_an_ended_certificate_are_named(
    running: Federation, clock: str, cause: str
) -> None:
    if "LD_PRELOAD" in os.environ:
        pytest.skip("another library is loaded first")
    assert cause in said(running, "1", clock=clock)
