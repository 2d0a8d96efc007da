"""Wrong settings, folders and files are one line of error before any process starts, and before
torch is imported.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from fedsurrogate.common.backbones.backbone_names import check_backbone_name
from fedsurrogate.common.errors import BackboneError, ConfigError, FedSurrogateError, RunError
from fedsurrogate.common.machine import MIB, usable_cores
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment import submit as flower_engine
from fedsurrogate.server_app.lifecycle import before_start
from fedsurrogate.server_app.lifecycle.before_start import (
    FLOWER_MIB,
    LOCAL_MIB,
    SITE_MIB,
    check_addresses,
    check_local,
    check_output,
    check_records,
    check_simulation,
    check_submission,
    fitting_sites,
)
from tests.commands import coordinator
from tests.grid import FAST, run_federation, sites

ROUNDS = {"method": "fedavg", "fedavg.rounds": 1, "fedavg.local-epochs": 1}


def images(folder: Path, classes: str, count: int = 20) -> str:
    random = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(
                folder / name / f"{i}.png"
            )
    return str(folder)


@pytest.fixture
def wrong(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Settings that cannot work, and words of the error, by what is wrong."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "w.safetensors").write_bytes(b"this is text, and no safetensors file")
    files = 'backbone="torchvision:resnet18" weights-path='
    return {
        "backbone": ('backbone="torchvision:mobilenet_v9"', "similar names: mobilenet_v2"),
        "library": ('backbone="resnet18"', "is unknown; use 'pixels'"),
        "no weights": (f'{files}"{tmp_path}/none"', "does not exist"),
        "weights": (f'{files}"{tmp_path}/w.safetensors"', "is no safetensors file"),
        "output is a file": (f'output-dir="{tmp_path}/file"', "is a file; name a folder"),
        "output below a file": (f'output-dir="{tmp_path}/file/runs"', "is a file; name a folder"),
        "output": ('output-dir="/proc/runs"', "cannot be written"),
        "no data": ('data="imagefolder"', "needs data-dir"),
        "data-dir": (f'data="imagefolder" data-dir="{tmp_path}/none"', "does not exist"),
        "data is a file": (f'data="imagefolder" data-dir="{tmp_path}/file"', "is a file"),
        "resume of one shot": (f'resume="{tmp_path}/empty"', "has no rounds"),
        "resume of a method alone": (f'method="local" resume="{tmp_path}/empty"', "has no rounds"),
        "resume of nothing": (f'method="fedavg" resume="{tmp_path}/none"', "is no folder"),
        "resume before a round": (
            f'method="fedavg" resume="{tmp_path}/empty"',
            "has no checkpoint.safetensors",
        ),
        "device": ('device="cuda:77"', "GPUs; use 'cpu' or 'auto'"),
        "key": ("fedpft.rnak=3", "unknown key 'fedpft.rnak'; did you mean 'fedpft.rank'?"),
        "value": ("epsilon=1.0", "epsilon = 1"),
        "no value": ("seed 3", "cannot read 'seed 3'"),
    }


def test_what_needs_no_data_is_one_line_and_starts_nothing(
    wrong: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for what, (settings, words) in wrong.items():
        for engine in ("flower", "local"):
            assert coordinator(monkeypatch, "simulate", "--engine", engine, "-c", settings) == 1, (
                what
            )
            error = capsys.readouterr().err
            assert words in error, what
            assert error.count("\n") == 1, what
    assert sorted(tmp_path.rglob("*")) == before


def test_what_needs_no_data_is_checked_without_torch(tmp_path: Path) -> None:
    """Importing torch takes over a second, a library of backbones several."""
    code = """
import sys
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.server_app.lifecycle.before_start import check_simulation
for backbone in ("torchvision:mobilenet_v9", "timm:resnet50", "open_clip:ViT-B-32/openai", "open_clip:x/y"):
    try:
        check_simulation({"backbone": backbone, "output-dir": sys.argv[1]})
    except FedSurrogateError:
        pass
assert not {"torchvision", "timm", "open_clip", "torch", "ray"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code, tmp_path], check=True, cwd=Path(__file__).parents[3]
    )


def test_every_model_of_torchvision_passes() -> None:
    from torchvision import models

    for name in models.list_models(module=models):
        check_backbone_name(f"torchvision:{name}")


def test_records_are_checked_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    (tmp_path / "empty").mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "t.csv").write_text("path,diagnosis\n0.png,a\n")
    one, two = images(tmp_path / "one", "a"), images(tmp_path / "two", "ab")
    deep = images(tmp_path / "deep" / "train", "ab")
    for data_dir, number, more, words in (
        (str(tmp_path / "empty"), 3, {}, "has no images in class folders"),
        (one, 3, {}, "have one class only ('a')"),
        (str(tmp_path / "t"), 3, {}, "'diagnosis'; rename them, or correct label-column"),
        (two, 60, {}, "use at most 32 sites"),
        (two, 3, {"partition": "classes", "classes-per-site": 3}, "classes-per-site = 3"),
        (two, 3, {"classes": "x,y"}, "no record of the classes x, y"),
        (str(Path(deep).parent), 3, {}, f"set data-dir to '{deep}'"),
    ):
        settings = {
            "data": "imagefolder",
            "data-dir": data_dir,
            "output-dir": str(tmp_path / "runs"),
        } | more
        with pytest.raises(FedSurrogateError, match=r".") as caught:
            flower_engine.simulate(number, settings, flower_engine.Machine(), lambda event: None)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_sites_of_one_class_are_one_warning(tmp_path: Path) -> None:
    settings = {"data": "imagefolder", "data-dir": images(tmp_path / "two", "ab"), "alpha": 0.01}
    data, *more = check_records(settings, 4)
    assert data.startswith("data imagefolder: ")
    (warning,) = more
    assert re.fullmatch(
        r"site \d( and \d more sites)?: records of one class only \([ab]\); a larger alpha is more even",
        warning,
    )
    assert check_records({"partition": "iid"}, 3) == []
    (warning,) = check_records({"partition": "iid"}, 1437)
    assert "site 1 and 1,435 more sites" in warning  # Site 0 has two records.
    assert "fewer sites" in warning


def test_weights_that_cannot_be_fetched_end_the_command_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: object, **settings: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    settings = {
        "data": "imagefolder",
        "data-dir": images(tmp_path / "two", "ab"),
        "backbone": "torchvision:resnet18",
    }
    with pytest.raises(
        BackboneError, match=r"cannot fetch the weights of 'torchvision:resnet18' .*no network"
    ):
        check_records(settings, 2)


def test_resume_names_the_settings_that_differ(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(2), **ROUNDS)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["simulated"] is False
    (folder / "manifest.json").write_text(json.dumps(manifest | {"simulated": True}))
    resumed = ROUNDS | {"resume": str(folder), "output-dir": str(tmp_path)}
    check_simulation(resumed | {"device": "cpu", "compare": True})
    for key, value in {
        "fedavg.local-epochs": 2,
        "seed": 1,
        "alpha": 9.0,
        "test-fraction": 0.3,
    }.items():
        with pytest.raises(RunError, match=rf"has other settings: {key} = .*, here {value}"):
            check_simulation(resumed | {key: value})
    with pytest.raises(ConfigError, match="has no rounds"):
        check_simulation({"resume": str(folder)})


def test_a_simulation_is_not_continued_at_hospitals(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(2), **ROUNDS)
    with pytest.raises(RunError, match="is a run with connected sites, and this is a simulation"):
        check_simulation(ROUNDS | {"resume": str(folder), "output-dir": str(tmp_path)})


@pytest.mark.parametrize("named", [{"data-dir": "/images"}, {"dataset": "a,b"}], ids=str)
def test_a_run_that_names_data_and_no_kind_is_refused_as_a_simulation_is(
    named: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="but data = 'digits', the default"):
        check_submission(parse_run(named), "fl.example.org:9093")
    check_submission(parse_run(named | {"data": "imagefolder"}), "fl.example.org:9093")


def test_a_run_at_a_superlink_elsewhere_is_checked_as_far_as_possible(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config, _ = check_simulation({"output-dir": str(tmp_path)})
    wrong = replace(
        config, settings=config.settings.model_copy(update={"output_dir": str(tmp_path / "file")})
    )
    check_submission(wrong, "fl.example.org:9093")
    for here in ("127.0.0.1:9093", "localhost:9093", "[::1]:9093"):
        with pytest.raises(ConfigError, match="is a file"):
            check_submission(wrong, here)
    unknown = replace(config, settings=config.settings.model_copy(update={"backbone": "resnet18"}))
    with pytest.raises(BackboneError, match="is unknown"):
        check_submission(unknown, "fl.example.org:9093")


def test_a_wrong_output_folder_ends_the_coordinators_app_before_any_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        run_federation(tmp_path, sites(2), output_dir=str(tmp_path / "file"), **FAST)
    check_output(str(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()


def have(monkeypatch: pytest.MonkeyPatch, mib: float, extra: float = 0.0) -> None:
    """Make so much memory available, and so much swap."""
    monkeypatch.setattr(
        before_start, "available_memory", lambda swap=False: int((mib + swap * extra) * MIB)
    )


@given(some.integers(1, 200), some.integers(0, 200_000))
def test_as_many_sites_run_as_fit_and_a_warning_says_so(wanted: int, mib: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        have(patch, mib)
        if mib < FLOWER_MIB + SITE_MIB:
            with pytest.raises(RunError):
                fitting_sites(wanted)
            return
        fit, warning = fitting_sites(wanted)
    assert 1 <= fit <= wanted
    assert FLOWER_MIB + fit * SITE_MIB <= mib
    assert fit == wanted or FLOWER_MIB + (fit + 1) * SITE_MIB > mib
    assert bool(warning) == (fit < wanted)
    assert not warning or f"{fit} of {wanted} sites" in warning


def test_too_little_memory_is_one_line_with_numbers_and_another_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    have(monkeypatch, 1300)
    assert coordinator(monkeypatch, "simulate", "--engine", "flower", "--sites", 5) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "1300 MiB",
        f"{FLOWER_MIB + SITE_MIB} MiB",
        "--engine local",
        f"about {LOCAL_MIB} MiB",
    ):
        assert part in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 1), ("400000 100000", 4), ("max 100000", 16), (None, 16)]
)
def test_the_quota_of_a_container_limits_the_cores(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_one_site_may_use_the_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 1000, extra=1500)
    fit, warning = fitting_sites(8)
    assert fit == 1
    assert "1 of 8 sites" in warning


def test_the_local_engine_is_refused_too_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, LOCAL_MIB)
    check_local()
    monkeypatch.setattr(
        before_start.psutil.Process, "memory_info", lambda self: type("", (), {"rss": 50 * MIB})
    )
    have(monkeypatch, LOCAL_MIB - 51)
    with pytest.raises(RunError, match=f"about {LOCAL_MIB} MiB"):
        check_local()


def test_few_addresses_are_refused_with_the_command_that_lifts_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_addresses()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**31, 2**31))
    with pytest.raises(RunError, match="`ulimit -v unlimited`"):
        check_addresses()
