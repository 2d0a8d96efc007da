"""Extraction by a process a device, tried with several on the CPU: the features of one process bit
for bit, and no hang.
"""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from fedsurrogate.client_app.features import device_processes, extraction
from fedsurrogate.client_app.features.device_processes import Devices, in_processes
from fedsurrogate.client_app.features.extraction import Features, extract
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.backbones.backbones import Backbone, load_backbone
from fedsurrogate.common.errors import BackboneError, FedSurrogateError
from fedsurrogate.common.models import devices
from fedsurrogate.common.run import parse_run
from tests.client_app.features.other_processes import (
    BROKEN,
    COUNT,
    LAST,
    SHARD,
    backbone,
    complete,
    dataset_of,
    disturbed,
    of_two_sizes,
    picture,
    use,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.setattr(extraction, "SHARD", SHARD)
    monkeypatch.setattr(extraction, "SHARDS_EACH", 1)
    monkeypatch.setattr(extraction, "gpus_of", extraction.gpus_of)
    return use


def features(
    folder: Path, opener: Callable[..., object] = picture, load: Callable[..., Backbone] = backbone
) -> Features:
    return extract(dataset_of(opener), load(), folder / "cache", load=load)  # type: ignore[arg-type]


def same(one: Features, other: Features) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.ok, other.ok)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Features:
    """The features by threads of this process, in shards of usual length."""
    return features(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_give_the_bits_of_one(
    tmp_path: Path,
    alone: Features,
    processes: Callable[[int], None],
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    processes(number)
    with caplog.at_level(logging.INFO):
        assert same(features(tmp_path), alone)
    assert alone.ok.nonzero().flatten().tolist() == [
        row for row in range(COUNT) if row not in BROKEN
    ]
    assert f"features are computed by {number} processes" in caplog.text
    assert all(
        f"record {row + 1} is broken and skipped (OSError: no image {row})" in caplog.text
        for row in BROKEN
    )


def test_a_killed_process_is_an_error_and_the_next_request_continues(
    tmp_path: Path,
    alone: Features,
    processes: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    processes(2)
    (tmp_path / "kill").touch()
    with pytest.raises(
        FedSurrogateError, match=r"on cpu was ended by SIGKILL.*continues.*device.*'cuda:0'"
    ) as error:
        features(tmp_path, partial(disturbed, tmp_path))
    assert type(error.value) is FedSurrogateError
    done = complete(tmp_path)
    assert done >= 2
    (tmp_path / "kill").unlink()
    processes(1)
    with caplog.at_level(logging.INFO):
        assert same(features(tmp_path, partial(disturbed, tmp_path)), alone)
    assert " of 86 records are done already" in caplog.text
    assert not list(tmp_path.glob("cache/features/*.partial"))


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_processes_end_with_the_one_that_started_them(
    tmp_path: Path,
    alone: Features,
    processes: Callable[[int], None],
    end: signal.Signals,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "wait").touch()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from tests.client_app.features.other_processes import main; main({str(tmp_path)!r})",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    while complete(tmp_path) < 2:
        assert parent.poll() is None
        time.sleep(0.01)
    working = [psutil.Process(int(file.stem)) for file in tmp_path.glob("*.pid")]
    parent.send_signal(end)
    assert parent.wait() in (-end, 1)
    assert working
    for _ in range(6000):
        if not any(
            process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in working
        ):
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"still running: {working}")
    (tmp_path / "wait").unlink()
    with caplog.at_level(logging.INFO):
        processes(1)
        assert same(features(tmp_path, partial(disturbed, tmp_path)), alone)
    assert " of 86 records are done already" in caplog.text


def test_images_of_two_sizes_in_two_processes_need_an_image_size(
    tmp_path: Path, processes: Callable[[int], None]
) -> None:
    processes(2)
    with pytest.raises(BackboneError, match=r"of (6x4 and of 6x5|6x5 and of 6x4) px.*image-size"):
        features(tmp_path, of_two_sizes, partial(load_backbone, "pixels", "", 0))
    assert not [path for path in (tmp_path / "cache" / "features").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (
            partial(load_backbone, "pixels:none", "", 0),
            r"BackboneError: backbone = 'pixels:none' is unknown",
        ),
        (partial(load_backbone, "pixels:rgb", "", 0), r"has fingerprint"),
    ],
)
def test_a_backbone_that_another_process_cannot_load_is_an_error_that_keeps_shards(
    load: Callable[[str], Backbone], why: str
) -> None:
    there = Devices(("cpu",), load, load_backbone("pixels", device="cpu").fingerprint)
    with pytest.raises(FedSurrogateError, match=rf"on cpu failed \(.*{why}") as error:
        list(in_processes(picture, [range(LAST)], there, 64))
    assert type(error.value) is FedSurrogateError


def test_a_site_starts_processes_for_its_own_images(
    tmp_path: Path, processes: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for index in range(2 * SHARD):
        file = tmp_path / "data" / "ab"[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(100 + index).save(file)
    run = parse_run({"image-size": 8})
    found = []
    for number in (2, 1):
        processes(number)
        settings = {
            "data": "imagefolder",
            "data-dir": str(tmp_path / "data"),
            "cache-dir": str(tmp_path / f"{number}"),
        }
        node = parse_node_config(settings)
        found.append(load_site(run, node, policy_of(node).cache_mib))
    assert torch.equal(found[0].train.features, found[1].train.features)
    assert found[0].train.features.abs().sum() > 0


@pytest.mark.parametrize(("device", "expected"), [("cuda", 3), ("cuda:1", 0), ("cpu", 0)])
def test_only_a_device_without_a_number_is_all_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices.gpus_of(torch.device(device)) == tuple(
        f"cuda:{index}" for index in range(expected)
    )


def test_too_many_open_files_are_not_a_fault_of_the_cache(
    tmp_path: Path, processes: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes(2)

    def none() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(device_processes, "Pipe", none)
    with pytest.raises(
        FedSurrogateError, match=r"on cpu cannot be started .*Too many open files"
    ) as error:
        features(tmp_path)
    assert type(error.value) is FedSurrogateError
