"""Upgrade and rollback: the state that the version before wrote is continued by this one, and the
other way round.

The version before is the commit in previous_version.txt; a release puts its own there. Without the
history of the repository (an archive, a shallow clone) the tests are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsurrogate.common.renamed import RENAMED
from tests.children import ok
from tests.e2e.hospitals import CLASSES, write_features
from tests.e2e.processes import until
from tests.grid import events_of, metrics_of, run_folders

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
PREVIOUS = (Path(__file__).parent / "previous_version.txt").read_text().strip()
PRIVATE = (
    f'epsilon=0.5 delta=1e-5 classes="{CLASSES}" fedpft.covariance="spherical" '
    "head.min-steps=20 head.epochs=1"
)
# With a size: without one, the fingerprint of pixels is another since version 0.1.0.
ROUNDS = 'method="fedavg" fedavg.rounds=6 fedavg.local-epochs=100 image-size=8'


class Version:
    """The commands of one version, run in `home`."""

    def __init__(self, source: Path, home: Path) -> None:
        self.source, self.home = source, home

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start `coordinator ...` or `site ...`."""
        room = {"coordinator": "server_app", "site": "client_app"}[words[0]]
        # Before 0.2.0 the rooms were packages of their own.
        inside = "__path__" in (self.source / "fedsurrogate" / "__init__.py").read_text()
        module = f"{'fedsurrogate.' * inside}{room}.cli.main"
        environment = os.environ | {
            "PYTHONPATH": str(self.source),
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", module, *words[1:]],
            cwd=self.home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str) -> str:
        """Run a command to its end, which must be a success, and return its output. The version
        before may have it under another name.
        """
        if not any(self.source.glob("common/renamed*.py")):
            before = {new: old for old, new in RENAMED[words[0]].items()}
            words = (
                words[0],
                *before.get(" ".join(words[1:3]), " ".join(words[1:3])).split(),
                *(word.replace("check-log-dir=", "witness-dir=") for word in words[3:]),
            )
        process = self.begin(*words)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return output


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Version, Version]:
    """The version before, and this one."""
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow.stdout.strip() != b"false":
        pytest.skip("needs a repository with its whole history")
    archive = ok(git("archive", PREVIOUS))
    before = tmp_path / "before"
    before.mkdir()
    subprocess.run(["tar", "-x", "-C", str(before)], input=archive.stdout, check=True)
    return Version(before, tmp_path), Version(ROOT, tmp_path)


def test_a_hospitals_ledger_keys_and_bundles_pass_from_version_to_version_and_back(
    versions: tuple[Version, Version], tmp_path: Path
) -> None:
    before, now = versions
    write_features(tmp_path / "data", 0)
    before.run("coordinator", "sites", "key", "certificates")
    node = (
        f'site="north" data="safetensors" data-dir="{tmp_path}/data" dataset="f" '
        f'state-dir="{tmp_path}/state" check-log-dir="{tmp_path}/check-log" '
        f'cache-dir="{tmp_path}/cache" coordinator-key="{tmp_path}/certificates/coordinator.pub"'
    )
    before.run("site", "ledger", "open", "--node-config", node)
    (tmp_path / "keys.toml").write_text(before.run("site", "offline", "key", "--node-config", node))
    pairs = [(before, before), (before, now), (now, before)]
    for number, (coordinator, site) in enumerate(pairs):
        request, bundle = f"{number}.json", f"{number}.bundle"
        # Request and release by each pair of versions, and the learning by the other one.
        # A site of the version before knows no public map.
        plain = ' features.projection=""' if coordinator is now else ""
        coordinator.run(
            "coordinator",
            "offline",
            "request",
            "certificates",
            "--out",
            request,
            "-c",
            PRIVATE + plain,
        )
        site.run("site", "offline", "release", request, "--out", bundle, "--node-config", node)
        learner = now if coordinator is before else before
        assert "epsilon 0.5" in learner.run(
            "coordinator", "offline", "learn", request, bundle, "--keys", "keys.toml"
        )
    ledgers = [
        line
        for file in (tmp_path / "state").rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert sum(json.loads(line).get("kind") == "release" for line in ledgers) == len(pairs)
    first, second = (
        json.loads(version.run("site", "ledger", "show", "--json", "--node-config", node))
        for version in versions
    )
    assert second == first | {"refusal": ""}, "both versions read the same"
    assert (
        now.run("site", "offline", "key", "--node-config", node)
        == (tmp_path / "keys.toml").read_text()
    )


def test_a_run_is_continued_by_the_version_that_began_it_and_read_by_both(
    versions: tuple[Version, Version], tmp_path: Path
) -> None:
    """The next version has another digest for the same settings, and says which one continues."""
    before, now = versions
    output = tmp_path / "runs"
    words = ["coordinator", "simulate", "--engine", "local", "--sites", "2", "-c"]
    process = before.begin(*words, f'{ROUNDS} output-dir="{output}"')
    until(lambda: process.poll() is not None or has_round(output, 1))
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    again = f'{ROUNDS} output-dir="{output}" resume="{run_folders(output)[-1]}"'
    other = now.begin(*words, again)
    assert "continue it with version 0." in other.communicate(timeout=300)[1]
    before.run(*words, again)
    last = run_folders(output)[-1]
    assert metrics_of(last)["status"] == "ok"
    assert [each["round"] for each in metrics_of(last)["rounds"]] == list(range(1, 7))
    now.run("coordinator", "report", str(last))


def has_round(output: Path, number: int) -> bool:
    """Whether any run has done this round."""
    found = [
        event
        for folder in run_folders(output)
        if (folder / "events.jsonl").exists()
        for event in events_of(folder)
    ]
    return any(event["event"] == "round" and event["round"] >= number for event in found)
