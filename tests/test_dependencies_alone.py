"""An environment with the dependencies alone: what works there, and what every optional feature
answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.common.extras import DISTRIBUTIONS, EXTRAS, install_command
from tests.children import ok, ran
from tests.documents import ROOT, blocks
from tests.test_dependencies import PROJECT, closure
from tests.uses_of_extras import USES

Run = Callable[..., subprocess.CompletedProcess[str]]
COORDINATOR, SITE = (
    ("-m", "fedsurrogate.server_app.cli.main"),
    ("-m", "fedsurrogate.client_app.cli.main"),
)
QUICK = "head.min-steps=20 head.epochs=1"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python with the project and its dependencies alone, which a folder of links shows it;
    without pip.
    """
    home = tmp_path_factory.mktemp("alone")
    packages = home / "packages"
    packages.mkdir()
    for name in closure(*PROJECT["dependencies"]):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            # For another platform, or a part of torch for GPUs.
            continue
        for top in {
            file.parts[0]
            for file in found.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            link, target = packages / top, Path(str(found.locate_file(top)))
            if target.exists() and not link.exists():
                link.symlink_to(target)
    venv.create(home / "venv", with_pip=False)
    base = {"base": str(home / "venv"), "platbase": str(home / "venv")}
    (Path(sysconfig.get_path("purelib", vars=base)) / "alone.pth").write_text(
        f"{packages}\n{ROOT}\n"
    )
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment |= {"HOME": str(home), "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(home / "venv" / "bin" / "python"), *map(str, words)]
        return ran(command, env=environment, cwd=home, timeout=300)

    return run


def test_the_environment_has_no_optional_package(alone: Run) -> None:
    names = [*EXTRAS, "pytest", "pip"]
    done = alone(
        "-c", f"import importlib.util as u; print(*(name for name in {names} if u.find_spec(name)))"
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_library_is_imported_and_the_example_of_the_readme_runs(alone: Run) -> None:
    (example,) = (block for block in blocks(ROOT / "README.md", "python") if "fs.simulate" in block)
    done = ok(alone("-c", example))
    accuracy, labels = done.stdout.split("\n")[:2]
    assert float(accuracy) > 0.7
    assert labels


def test_surrogates_are_fitted_and_learned_and_get_noise(alone: Run) -> None:
    script = """
import fedsurrogate as fs
from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
sites = [fs.fit(x[k::2] / 16, y[k::2], site=str(k), covariance="spherical") for k in range(2)]
budget = dict(classes=range(10), epsilon=4.0, delta=1e-5, covariance="spherical")
private = [fs.noisy(x[k::2] / 16, y[k::2], site=str(k), **budget) for k in range(2)]
print(fs.learn(sites).score(x / 16, y), fs.learn(private).score(x / 16, y), fs.epsilon(2.0, 1e-5))
"""
    done = ok(alone("-c", script))
    plain, noisy, epsilon = map(float, done.stdout.split())
    assert plain > 0.8
    assert noisy > 0.3
    assert epsilon > 0


def test_a_simulation_runs_on_digits_and_on_stored_features(alone: Run, tmp_path: Path) -> None:
    settings = f'output-dir="{tmp_path}/runs" {QUICK}'
    done = ok(alone(*COORDINATOR, "simulate", "--engine", "local", "--json", "-c", settings))
    metrics = json.loads(done.stdout)
    assert metrics["accuracy"]["model"] > 0.6
    page = (Path(metrics["folder"]) / "report.html").read_text()
    assert "matplotlib is not installed where this page was written" in page
    features = torch.randn(200, 4) + 3 * torch.arange(2).repeat(100)[:, None]
    save_file({"x": features, "y": torch.arange(2).repeat(100)}, tmp_path / "part.safetensors")
    settings += f' data="safetensors" data-dir="{tmp_path}"'
    # Without --engine: no Ray, so in this process.
    done = ok(alone(*COORDINATOR, "simulate", "--json", "-c", settings))
    assert json.loads(done.stdout)["accuracy"]["model"] > 0.9
    # Options that only Flower's simulation has ask for it.
    for wanted in (("--engine", "flower"), ("--parallel", "1"), ("--gpus", "0.5")):
        done = alone(*COORDINATOR, "simulate", *wanted, "-c", settings)
        assert (done.returncode, done.stdout) == (1, "")
        assert "error: --engine flower needs the package ray" in done.stderr
        assert "use --engine local" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        (*COORDINATOR, "--help"),
        (*COORDINATOR, "plan", "--dimension", "64", "--json"),
        (*COORDINATOR, "settings", "--method", "fedpft"),
        (*SITE, "--help"),
        (*SITE, "settings"),
    ],
    ids=lambda words: " ".join(words[1:3]),
)
def test_a_command_works(alone: Run, words: tuple[str, ...]) -> None:
    done = ok(alone(*words))
    assert done.stdout.strip()


def test_a_site_examines_itself(alone: Run, tmp_path: Path) -> None:
    node = (
        f'data="{{}}" data-dir="{tmp_path}" state-dir="{tmp_path}/state" '
        f'cache-dir="{tmp_path}/cache"'
    )
    done = alone(*SITE, "doctor", "--node-config", node.format("digits"), "--json")
    found = {each["what"]: each["state"] for each in json.loads(done.stdout)}
    assert (found["packages"], found["data"], found["backbone"]) == ("PASS", "PASS", "PASS"), (
        done.stderr
    )
    assert alone(*SITE, "check", "--node-config", node.format("digits"), "--json").returncode == 0
    done = alone(*SITE, "doctor", "--node-config", node.format("parquet"), "--json")
    assert done.returncode == 1
    (finding,) = (each for each in json.loads(done.stdout) if each["what"] == "packages")
    assert finding["state"] == "FAIL"
    assert install_command("tables") in finding["found"]


def test_every_optional_feature_answers_with_its_package_and_its_command(
    alone: Run, tmp_path: Path
) -> None:
    done = ok(alone("-m", "tests.uses_of_extras", tmp_path))
    answers = json.loads(done.stdout)
    assert len(answers) == len(USES)
    for (package, user, _), (kind, text) in zip(USES, answers, strict=True):
        assert kind == "PackageError", (package, user, kind, text)
        assert text.startswith(user)
        assert text.count(install_command(EXTRAS[package])) == 1
        # Of several packages of an extra the first that is missing is named.
        names = {
            DISTRIBUTIONS.get(name, name)
            for name, extra in EXTRAS.items()
            if extra == EXTRAS[package]
        }
        assert any(f"needs the package {name}," in text for name in names)
