"""A missing package gives one error, before a run starts, with the setting that needs it and the
command to install it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fedsurrogate.client_app.audit.disclosure import check_run
from fedsurrogate.client_app.diagnostics.first_look import first_look
from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.governance.ledger import own_ledger
from fedsurrogate.client_app.node_config import packages_of, parse_node_config
from fedsurrogate.common.backbones.backbone_names import LIBRARIES
from fedsurrogate.common.errors import PUBLIC_SENTENCES, PackageError, RunError
from fedsurrogate.common.extras import (
    DISTRIBUTIONS,
    EXTRAS,
    OF_DATA,
    check_installed,
    check_packages,
    install_command,
    is_installed,
    needed_for,
    packages_for,
)
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.run import parse_run
from tests import commands
from tests.grid import FAST, InProcessGrid, events_of, run_federation, run_folders
from tests.uses_of_extras import PRIVATE, USES, hidden

Captured = pytest.CaptureFixture[str]


def test_every_optional_package_is_used_here() -> None:
    assert {package for package, _, _ in USES} == set(EXTRAS)


@pytest.mark.parametrize(
    "number", range(len(USES)), ids=lambda number: f"{USES[number][0]}-{number}"
)
def test_a_missing_package_gives_one_error_with_its_user_and_its_command(
    number: int, tmp_path: Path
) -> None:
    package, user, use = USES[number]
    with hidden(package), pytest.raises(PackageError) as caught:
        use(tmp_path)
    text = str(caught.value)
    assert text.startswith(user)
    assert (
        f"needs the package {DISTRIBUTIONS.get(package, package)}, which is not installed here"
        in text
    )
    assert text.count(f"run {install_command(EXTRAS[package])}") == 1
    assert "\n" not in text
    assert not run_folders(tmp_path / "runs"), "the run has started"


def test_an_installed_package_is_no_error_and_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    check_installed("pyarrow", "this test")
    assert is_installed("pyarrow")
    assert "pyarrow" not in sys.modules
    with needed_for("this test"):
        import pydicom
    assert pydicom


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'regex'", name="regex"),
        ModuleNotFoundError("No module named 'pydicom.nothing'", name="pydicom.nothing"),
        ImportError("libcudart.so.12: cannot open shared object file", name="torchvision"),
        ValueError("another error"),
    ],
)
def test_a_damaged_package_is_not_taken_for_a_missing_one(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, needed_for("this test"):
        raise error
    assert caught.value is error


def test_packages_that_settings_need_are_in_the_table_of_extras() -> None:
    assert set(OF_DATA.values()) | set(LIBRARIES) <= set(EXTRAS)
    assert {package for spec in METHODS.values() for package in spec.usual.judging_packages} == {
        "ot"
    }


@pytest.mark.parametrize(
    ("settings", "data", "judges", "expected"),
    [
        ({}, "digits", True, []),
        ({"data": "parquet", "data-dir": "."}, "parquet", True, ["pyarrow"]),
        # A site with its own data needs what these need, not what the run's would.
        ({"data": "parquet", "data-dir": "."}, "dicom", True, ["pydicom"]),
        ({"backbone": "timm:resnet18"}, "imagefolder", True, ["timm"]),
        ({"backbone": "timm:resnet18"}, "safetensors", True, []),
        ({"backbone": "timm:resnet18"}, "slides", True, ["h5py"]),
        ({"method": "dpcvae"}, "digits", True, ["ot"]),
        ({"method": "dpcvae"}, "digits", False, []),
        ({"method": "dp-fedprox", "fedavg.model": "convnet"} | PRIVATE, "digits", True, []),
        (
            {"method": "dp-fedavg", "secure-aggregation": True, "sites": 3} | PRIVATE,
            "digits",
            True,
            [],
        ),
    ],
)
def test_only_what_the_settings_use_is_needed(
    settings: dict[str, str], data: str, judges: bool, expected: list[str]
) -> None:
    run = parse_run(settings)
    assert [
        package for package, _ in packages_for(run.settings, run.plan, data, judges)
    ] == expected
    for package in expected:
        with (
            hidden(package),
            pytest.raises(PackageError, match=re.escape(install_command(EXTRAS[package]))),
        ):
            check_packages(packages_for(run.settings, run.plan, data, judges))
    check_packages(packages_for(run.settings, run.plan, data, judges))


PRIVATE_RUN = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "classes": "no,yes",
    "image_size": 8,
    "fedpft.covariance": "spherical",
}


@pytest.mark.parametrize("private", [PRIVATE_RUN, {"image_size": 8}], ids=["private", "open"])
def test_a_site_without_a_package_reports_a_code_before_any_work_and_charges_nothing(
    tmp_path: Path, private: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("no", "yes"):
        (tmp_path / "data" / name).mkdir(parents=True)
    policy = tmp_path / "policy.toml"
    policy.write_text("without-dp = true\n")
    own = {
        "data": "dicom",
        "data-dir": str(tmp_path / "data"),
        "policy": str(policy),
        "state-dir": str(tmp_path / "state"),
    }
    nodes = [own | {"site": name} for name in "ab"]
    grid = InProcessGrid(nodes)
    with hidden("pydicom"), pytest.raises(RunError):
        run_federation(tmp_path, grid, **private, **FAST)
    found = [dict(reply.content.config_records["info"]) for reply in grid.received]
    assert found
    assert {info["status"] for info in found if info["status"] != "ok"} == {"package"}
    # No text of a site leaves it.
    assert not any("reason" in info for info in found)
    (folder,) = run_folders(tmp_path / "runs")
    reasons = {
        event["reason"] for event in events_of(folder) if event["event"] in ("rejected", "dropped")
    }
    assert reasons <= {PUBLIC_SENTENCES["package"]}
    assert "pip install" not in json.dumps(events_of(folder))
    assert "data = 'dicom' needs the package pydicom" in caplog.text
    for node in nodes:
        ledger = own_ledger(parse_node_config(node))
        assert ledger is not None
        assert ledger.path.exists()
        assert ledger.entries() == []


def test_a_missing_package_is_not_taken_for_unusable_records_and_answered_with_noise(
    tmp_path: Path,
) -> None:
    for name in ("no", "yes"):
        (tmp_path / "data" / name).mkdir(parents=True)
    node = {
        "data": "dicom",
        "data-dir": str(tmp_path / "data"),
        "state-dir": str(tmp_path / "state"),
    }
    run = {key.replace("_", "-"): value for key, value in PRIVATE_RUN.items()}
    open_ledger(site := parse_node_config(node))
    with hidden("pydicom"), pytest.raises(PackageError, match="data = 'dicom'"):
        check_run(parse_run(run), site)
    # With the package, the same site answers as one without usable records.
    assert "no record of the classes" in str(check_run(parse_run(run), site)["failure"])


def test_a_site_does_not_join_and_its_doctor_fails_without_the_package_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    node = (
        f'data="dicom" data-dir="{tmp_path}" state-dir="{tmp_path}/state" '
        f'cache-dir="{tmp_path}/cache"'
    )
    with hidden("pydicom"):
        with pytest.raises(
            PackageError, match="data = 'dicom' in the node-config needs the package pydicom"
        ):
            first_look(parse_node_config({"data": "dicom", "data-dir": str(tmp_path)}), 0)
        assert commands.site(monkeypatch, "doctor", "--node-config", node, "--json") == 1
    (finding,) = (
        each for each in json.loads(capsys.readouterr().out) if each["what"] == "packages"
    )
    assert finding["state"] == "FAIL"
    assert install_command("dicom") in finding["found"]
    # A run's own needs are checked where its settings are given.
    node = f'data="digits" state-dir="{tmp_path}/state" cache-dir="{tmp_path}/cache"'
    run = 'method="dpcvae"'
    with hidden("ot"):
        commands.site(monkeypatch, "doctor", "--node-config", node, "--json", "--run-config", run)
    (finding,) = (
        each for each in json.loads(capsys.readouterr().out) if each["what"] == "packages"
    )
    assert (finding["state"], "method = 'dpcvae'" in finding["found"]) == ("FAIL", True)
    commands.site(monkeypatch, "doctor", "--node-config", node, "--json", "--run-config", run)
    (finding,) = (
        each for each in json.loads(capsys.readouterr().out) if each["what"] == "packages"
    )
    assert (finding["state"], finding["found"]) == ("PASS", "ot")


def test_a_run_without_matplotlib_ends_with_a_report_that_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with hidden("matplotlib"):
        folder = run_federation(
            tmp_path,
            [{"partition-id": i, "num-partitions": 2} for i in range(2)],
            report=True,
            **FAST,
        )
        page = (folder / "report.html").read_text()
        assert commands.coordinator(monkeypatch, "report", folder) == 0
        assert "warning: matplotlib is not installed" in capsys.readouterr().err
    assert json.loads((folder / "metrics.json").read_text())["status"] == "ok"
    assert page.count("matplotlib is not installed where this page was written") == 1
    assert "pip install &#39;fedsurrogate[plots]&#39;" in page
    assert '<svg class="' not in page
    assert commands.coordinator(monkeypatch, "report", folder) == 0
    assert "warning" not in capsys.readouterr().err
    drawn = (folder / "report.html").read_text()
    assert "matplotlib is not installed" not in drawn
    assert '<svg class="accuracy"' in drawn


@pytest.mark.parametrize(
    ("node", "run", "expected"),
    [
        ({"data": "dicom"}, {"method": "dpcvae"}, ["pydicom", "ot"]),
        # No accuracy of a hospital leaves such a run, so it computes none.
        ({"data": "dicom"}, {"method": "dpcvae"} | PRIVATE, ["pydicom"]),
        (
            {"data": "dicom"},
            {"method": "dpcvae", "secure-aggregation": True, "sites": 3, "classes": "0,1"},
            ["pydicom"],
        ),
        # A simulated site is on the coordinator's machine.
        ({}, {"method": "dpcvae"} | PRIVATE, ["ot"]),
        ({}, {"data": "parquet", "data-dir": "."}, ["pyarrow"]),
    ],
)
def test_a_site_needs_the_packages_of_its_own_data_and_of_what_it_computes(
    node: dict[str, str], run: dict[str, str], expected: list[str]
) -> None:
    assert [
        package for package, _ in packages_of(parse_run(run), parse_node_config(node))
    ] == expected


def test_a_folder_that_has_a_packages_name_by_chance_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chance_name").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("chance_name")
    (tmp_path / "chance_name" / "__init__.py").touch()
    assert is_installed("chance_name")
