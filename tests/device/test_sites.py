"""What a site and its tools do with a device besides a method: extraction, words of the doctor,
noise, files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedsurrogate
from benchmarks._gpu_parity import cvae, images, network, warnings_of
from fedsurrogate.client_app.diagnostics import site_checks
from fedsurrogate.client_app.features.device_processes import Devices, in_parts, in_processes
from fedsurrogate.client_app.methods.dp.record_gradients import NoisyMeans, PrivateGradient
from fedsurrogate.client_app.methods.dpcvae.training import private_gradient
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.backbones.weight_files import read_weights
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.devices import gpus_of, pick_device
from tests.device.machine import Machine
from tests.device.pretended_process import SIZE, OnGpus, backbone
from tests.device.pretended_process import network as small_network

BROKEN = 5
PYTHON = "python:tests.device.pretended_process:network"


def picture(index: int, _: int = 0) -> Image.Image:
    if index == BROKEN:
        raise OSError(f"no image {index}")
    return Image.fromarray(
        np.random.default_rng(index).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    )


def features_of(device: str, count: int, batch: int) -> tuple[Tensor, list[int]]:
    """Features and the rows of broken images, in the order of the records."""
    parts = list(in_parts(picture, [range(count)], backbone(device), batch))
    found = [part.features for part in parts if part.features is not None]
    rows = [row for part in parts for row in part.rows]
    assert rows == sorted(rows)
    return torch.cat(found), [row for part in parts for row, _ in part.broken]


@pytest.mark.parametrize(("count", "batch"), [(3, 64), (11, 4), (6, 1)])
def test_extraction_on_a_device_gives_the_features_of_a_processor(count: int, batch: int) -> None:
    here, broken = features_of("cpu", count, batch)
    with Machine() as machine:
        there, also = features_of("cuda", count, batch)
        assert not there.is_cuda
        assert also == broken == [BROKEN] * (count > BROKEN)
    assert machine.copies["to"] >= 1
    assert there.dtype == torch.float16
    torch.testing.assert_close(there, here)


def test_a_batch_that_does_not_fit_is_cut_and_the_features_stay() -> None:
    with Machine():
        whole, _ = features_of("cuda", 32, 16)
    with Machine(memory=2**17), warnings_of("fedsurrogate.site") as said:
        cut, _ = features_of("cuda", 32, 16)
    assert any("at a time" in each for each in said), said
    torch.testing.assert_close(cut.float(), whole.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "count"), [(("cuda:0", "cuda:1"), 2), (("cuda", "cuda"), 1)])
def test_two_processes_on_two_devices_or_one_give_the_features_of_one_process(
    names: tuple[str, ...], count: int
) -> None:
    shards = [range(start, start + 6) for start in range(0, 24, 6)]
    devices = Devices(names, OnGpus(count), backbone("cpu").fingerprint)
    found = {
        row: feature
        for part in in_processes(picture, shards, devices, 3)
        if part.features is not None
        for row, feature in zip(part.rows, part.features, strict=True)
    }
    with Machine():
        one, _ = features_of("cuda", 24, 3)
    assert sorted(found) == [row for row in range(24) if row != BROKEN]
    assert torch.equal(torch.stack([found[row] for row in sorted(found)]), one)


def test_the_python_interface_gives_features_in_memory() -> None:
    pictures = [picture(index) for index in range(3)]
    chosen = {"image_size": SIZE, "batch_size": 2}
    here = fedsurrogate.features(pictures, PYTHON, device="cpu", **chosen)
    with Machine():
        there = fedsurrogate.features(pictures, PYTHON, device="auto", **chosen)
        module = fedsurrogate.features(pictures, small_network().to("cuda"), **chosen)
        assert not there.is_cuda
        assert not module.is_cuda
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module, here, rtol=1e-5, atol=1e-5)


def gpu_findings(device: str = "auto", own: str = "auto") -> list[tuple[str, str]]:
    node = parse_node_config({"device": own})
    return [
        (each.state, each.found)
        for each in site_checks._machine(device, node)
        if each.what == "GPU"
    ]


def test_the_doctor_names_the_devices_that_auto_finds() -> None:
    assert gpu_findings() == [("WARN", "none is used; device cpu")]
    card = ("PASS", "Pretended GPU, 2.0 of 2.0 GiB free")
    for devices in (1, 2):
        with Machine(devices, memory=2**31):
            assert pick_device("auto") == "cuda"
            assert gpu_findings() == [card] * devices
            assert gpu_findings("cpu") == [("PASS", "none is used; device cpu")]
            assert gpu_findings(own=f"cuda:{devices - 1}") == [card]
            assert gpus_of(torch.device("cuda")) == tuple(
                f"cuda:{index}" for index in range(devices)
            )
            ((status, found),) = gpu_findings(own=f"cuda:{devices}")
            assert status == "FAIL"
            assert f"has {devices} GPUs" in found
            with pytest.raises(ConfigError, match=f"has {devices} GPUs"):
                pick_device(f"cuda:{devices}")


def test_noise_is_drawn_by_the_operating_system_and_moved_afterwards(system_noise: None) -> None:
    released = []
    with Machine() as machine:
        for _ in range(2):
            # The same state of every generator that a seed reaches.
            torch.manual_seed(0)
            torch.cuda.manual_seed_all(0)
            before = torch.get_rng_state(), [state.clone() for state in machine.random_states]
            body, model = network(8, 4, "cuda")
            private = PrivateGradient(body, images(8, 8, "cuda"), 0.3, 5.0, 1.0, 8)
            made = private(model, lambda values: values)
            assert all(each.is_cuda for each in made.values())
            trainer = cvae("cuda", 3, 6, 4, 2)
            x = torch.ones(5, 6, device="cuda")
            step = private_gradient(
                trainer, NoisyMeans(0.1, 5.0, 5), x, torch.zeros(5, dtype=torch.long).cuda()
            )
            after = torch.get_rng_state(), machine.random_states
            assert torch.equal(before[0], after[0])
            assert all(torch.equal(*pair) for pair in zip(before[1], after[1], strict=True))
            released.append((torch.cat([each.cpu().flatten() for each in made.values()]), step))
    assert not torch.equal(released[0][0], released[1][0])


def test_a_file_of_a_machine_with_a_gpu_is_read_on_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"weight": torch.arange(6.0).reshape(2, 3)}
    path = tmp_path / "weights.pt"
    with monkeypatch.context() as patched:
        # What torch.save writes there.
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(weights, path)
    with pytest.raises(RuntimeError, match="CUDA device"):
        torch.load(path, weights_only=True)
    assert torch.equal(read_weights(path)["weight"], weights["weight"])


def test_tensors_of_a_device_are_written_as_those_of_the_processor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with Machine():
        save_file({"weight": torch.ones(2, 3, device="cuda")}, path)
    assert torch.equal(load_file(path)["weight"], torch.ones(2, 3))
