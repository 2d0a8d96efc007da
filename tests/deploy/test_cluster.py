"""The job for SLURM, with the commands of a real site; SLURM itself is not needed for them."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from fedsurrogate.client_app.diagnostics.site_checks import check_isolation
from fedsurrogate.client_app.kit import read_kit
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from tests.children import ok, ran, refused
from tests.deploy.test_compose import DEPLOY, settings_of_a_kit
from tests.e2e.processes import until

JOB = DEPLOY / "cluster" / "site.sbatch"
# What a machine with Apptainer would do with the options, but for the isolation.
APPTAINER = """\
#!/bin/bash
printf '%s\n' "$@" > "$OPTIONS"
export FEDSURROGATE_NODE_CONFIG="$APPTAINERENV_FEDSURROGATE_NODE_CONFIG"
shift
while [ "$1" != "$SIF_FILE" ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A hospital's kit with two images, and folders with a blank in their names."""
    settings_of_a_kit(tmp_path)
    kit = (tmp_path / "north").rename(tmp_path / "the kit")
    (kit / ".env").write_text(
        (kit / ".env").read_text().replace("DATA=\n", "DATA=./own data\nDEVICE=cpu\n")
    )  # fmt: skip
    (kit / "data").rename(kit / "own data")
    for name in ("no", "yes"):
        (kit / "own data" / name).mkdir()
        Image.new("L", (8, 8)).save(kit / "own data" / name / "1.png")
    return kit


def environment(kit: Path, **more: str) -> dict[str, str]:
    """With the command `site` of this checkout, as install.sh gives it."""
    (commands := kit.parent / "bin").mkdir(exist_ok=True)
    (commands / "site").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m fedsurrogate.client_app.cli.main "$@"\n'
    )
    (commands / "site").chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(APP_FOLDER), "PATH": path} | more


def job(kit: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return ran(["bash", str(JOB), *words], cwd=kit, env=environment(kit, **more))


@pytest.mark.slow
def test_a_job_opens_the_ledger_of_the_kits_data_and_the_next_one_finds_it(kit: Path) -> None:
    ok(job(kit, "ledger", "open"))
    assert list((kit / "state" / "ledgers").glob("*.jsonl"))
    assert list((kit / "check-log").glob("*.witness"))
    shown = ok(job(kit, "ledger", "show"))
    assert "nothing has left yet" in shown.stdout


@pytest.mark.parametrize(
    ("encoding", "end"), [("utf-8", "\n"), ("utf-8-sig", "\r\n")], ids=["here", "windows"]
)
def test_with_apptainer_data_are_read_only_and_the_job_does_the_same(
    kit: Path, encoding: str, end: str
) -> None:
    settings = (kit / ".env").read_text() + "SIF=site.sif\n"
    (kit / ".env").write_bytes(settings.replace("\n", end).encode(encoding))
    (kit.parent / "bin").mkdir()
    (kit.parent / "bin" / "apptainer").write_text(APPTAINER)
    (kit.parent / "bin" / "apptainer").chmod(0o755)
    (kit / "site.sif").touch()
    more = {"OPTIONS": str(kit / "options"), "SIF_FILE": str(kit / "site.sif")}
    ok(job(kit, "ledger", "open", **more))
    options = (kit / "options").read_text().splitlines()
    assert options[:3] == ["exec", "--containall", "--no-home"]
    assert f"{kit}/own data:{kit}/own data:ro" in options
    assert not any(str(Path.home()) == each for each in options)
    assert not any("data-dir" in each or "https_proxy" in each for each in options)


@pytest.mark.parametrize(
    "image",
    [
        "docker://evil.example/site",
        "--bind=/:/all",
        "instance://other",
        "library://a/b",
        "no.sif",
        ".",
    ],
)
def test_the_image_of_a_job_is_a_file_of_this_machine(kit: Path, image: str) -> None:
    """The coordinator made .env: from elsewhere Apptainer takes whatever image it names, with the data."""
    (kit / ".env").write_text((kit / ".env").read_text() + f"SIF={image}\n")
    (commands := kit.parent / "bin").mkdir()
    for name in ("site", "apptainer"):
        (commands / name).write_text("#!/bin/sh\ntouch ran\n")
        (commands / name).chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"
    refused(
        ran(["bash", str(JOB), "ledger", "show"], cwd=kit, env=os.environ | {"PATH": path}),
        f"SIF={image} is no file",
    )
    assert not (kit / "ran").exists()


@pytest.mark.parametrize("lacking", [".env", "own data"])
def test_what_is_missing_is_named(kit: Path, lacking: str) -> None:
    path = kit / lacking
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = job(kit, "ledger", "show")
    assert done.returncode == 1
    named = (
        f"site.sbatch: {kit}" if lacking == ".env" else f"{kit}/.env: DATA=./own data is no folder"
    )
    assert named in done.stderr


@pytest.mark.slow
def test_the_end_of_its_time_ends_the_site(kit: Path) -> None:
    """No coordinator is there, so it waits for one; SLURM sends SIGTERM ten minutes before the end."""
    assert job(kit, "ledger", "open").returncode == 0
    log = kit.parent / "log"
    # A test beside this one may have a SuperNode that starts what runs bring: the doctor refuses then.
    for _ in range(10):
        until(lambda: check_isolation().state != "FAIL")
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", str(JOB)], cwd=kit, env=environment(kit), stdout=output, stderr=output
            )
        ended = process.poll
        until(lambda ended=ended: "waiting" in log.read_text() or ended() is not None)
        if process.poll() is None or "FAIL  isolation" not in log.read_text():
            break
    assert process.poll() is None, log.read_text()
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    assert "Traceback" not in log.read_text()


COMMAND = 'touch "$PWD/ran"'


@pytest.mark.parametrize(
    "line",
    [
        f"X[$({COMMAND})]=1",
        f"DATA[$({COMMAND})]=1",
        f"DATA=$({COMMAND})",
        f"DATASET=`{COMMAND}`",
        f"LABEL_COLUMN=a;{COMMAND}",
        f'WEIGHTS=" ; {COMMAND}; "',
        f"BASH_ENV=$({COMMAND})",
        "LD_PRELOAD=./own.so",
        "PYTHONPATH=./own",
        "FEDSURROGATE_NODE_CONFIG=policy=no",
        'DATASET=x" policy="own.toml',
        f"!SITE=$({COMMAND})",
    ],
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_nothing_of_the_settings_runs_or_becomes_another_setting(
    kit: Path, line: str, end: str
) -> None:
    """The coordinator made the file; a subscript of a name was evaluated by a shell."""
    (kit / ".env").write_text((kit / ".env").read_text() + line + end)
    (commands := kit.parent / "bin").mkdir()
    (commands / "site").write_text("#!/bin/sh\nenv > seen\n")
    (commands / "site").chmod(0o755)
    known = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    done = ran(
        ["bash", str(JOB), "ledger", "show"],
        cwd=kit,
        env=known | {"PATH": f"{commands}:{known['PATH']}"},
    )
    assert not (kit / "ran").exists(), done.stderr
    seen = (kit / "seen").read_text() if (kit / "seen").exists() else ""
    assert not {"LD_PRELOAD", "BASH_ENV", "PYTHONPATH"} & {
        each.partition("=")[0] for each in seen.split("\n")
    }
    assert f"\nFEDSURROGATE_NODE_CONFIG={kit}\n" in seen
    with suppress(ConfigError):
        node = parse_node_config(parse_overrides([read_kit(kit).node_config()]))
        assert node.policy == str(kit / "policy" / "policy.toml")
    assert not (kit / "ran").exists()
