"""Code of a site is named by the site alone, and an own backbone can neither disclose image sizes
nor mix records.
"""

import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from PIL import Image

from fedsurrogate.client_app.features.site_features import site_backbone
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.backbones.own_backbones import own_backbone
from fedsurrogate.common.errors import BackboneError, ConfigError, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.wire.records import INFO, to_record
from tests.commands import coordinator
from tests.grid import (
    FIRST_NODE,
    InProcessGrid,
    default_run_config,
    events_of,
    metrics_of,
    outcome,
    run_federation,
)

PACKAGE = "vision_of_a_hospital"
CODE = """
import torch
from torch import nn
from torchvision.transforms.functional import pil_to_tensor, resize
CALLS = []

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)
    def forward(self, x):
        return self.layer(x.mean((2, 3)))

class Hidden(Mean):
    def __init__(self):
        super().__init__()
        self.shift = torch.full((5,), SHIFT)
    def forward(self, x):
        return super().forward(x) + self.shift

SHIFT = 1.0
def small(image):
    return resize(pil_to_tensor(image), [8, 8]).float() / 255
def mean():
    CALLS.append("mean")
    return Mean(), small
def without_transform(): return Mean()
def hidden(): return Hidden(), small
def fails(): raise OSError("/secret/weights.pt")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the site's own that can be imported."""
    folder = tmp_path / "code" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "models.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(folder.parent))
    invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


def named(function: str) -> str:
    return f"python:{PACKAGE}.models:{function}"


def hospital(folder: Path, site: str, **settings: Any) -> dict[str, Any]:
    """The node-config of a site with images of two classes."""
    random = np.random.default_rng(len(site))
    for brightness, name in ((60, "dark"), (200, "light")):
        (folder / site / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(brightness - 50, brightness + 50, (8, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / site / name / f"{number}.png")
    return {"site": site, "data": "imagefolder", "data-dir": str(folder / site), **settings}


@pytest.mark.parametrize(
    "backbone", ["python:os:system", "PYTHON:os:system", " python :os:system", "python:"]
)
def test_a_run_cannot_name_code(
    backbone: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="cannot name code of a site"):
        parse_run({"backbone": backbone})
    assert coordinator(monkeypatch, "simulate", "-c", f'backbone="{backbone}"') == 1
    assert "cannot name code of a site" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.hello"])
def test_a_site_refuses_a_request_that_names_code_and_does_not_run_it(
    kind: str, package: Path, tmp_path: Path
) -> None:
    node = hospital(
        tmp_path, "a", **{"state-dir": str(tmp_path / "state"), "backbone": named("mean")}
    )
    grid = InProcessGrid([node])
    # What a coordinator sends that does not check its own settings.
    grid.run_config = default_run_config() | {"backbone": named("mean")}
    message = Message(to_record(None, {"run": "0" * 16}), FIRST_NODE, kind)
    (reply,) = grid.pull_messages(grid.push_messages([message]))
    info = reply.content[INFO]
    assert isinstance(info, ConfigRecord)
    assert info["status"] == "config"
    assert f"{PACKAGE}.models" not in sys.modules


def test_a_simulation_on_the_command_line_says_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coordinator(monkeypatch, "simulate", "-c", 'backbone="own"') == 1
    assert "site features" in capsys.readouterr().err


def test_own_does_nothing_at_a_site_that_names_no_backbone() -> None:
    run, node = parse_run({"backbone": "own"}), parse_node_config({"data": "imagefolder"})
    with pytest.raises(BackboneError, match="node-config names none"):
        site_backbone(run.settings, node)


def test_a_site_cannot_be_made_to_use_its_code_by_another_name(package: Path) -> None:
    """Its own backbone serves runs that request it only; a named one stays what it is."""
    node = parse_node_config({"data": "imagefolder", "backbone": named("mean"), "device": "cpu"})
    assert site_backbone(parse_run({"backbone": "pixels"}).settings, node).name == "pixels"
    assert f"{PACKAGE}.models" not in sys.modules
    assert site_backbone(parse_run({"backbone": "own"}).settings, node).dim == 5


@pytest.mark.parametrize(
    "wrong",
    ["os:system", "python:os", "python:os:system()", "torchvision:resnet18", "python:os:a b"],
)
def test_the_key_of_a_site_names_a_function(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"backbone.*must name a function"):
        parse_node_config({"backbone": wrong})


def test_a_transform_and_an_image_size_contradict_each_other(package: Path) -> None:
    with pytest.raises(BackboneError, match="set it to 0"):
        own_backbone(named("mean"), 32, "cpu")
    assert own_backbone(named("without_transform"), 32, "cpu").dim == 5


def test_everything_that_decides_features_is_in_the_fingerprint(package: Path) -> None:
    first, hidden = (
        own_backbone(named(name), device="cpu").fingerprint for name in ("mean", "hidden")
    )
    assert own_backbone(named("mean"), device="cpu").fingerprint == first, "the same at every call"
    loaded = sys.modules[f"{PACKAGE}.models"]
    loaded.SHIFT = 2.0  # type: ignore[attr-defined]
    assert own_backbone(named("hidden"), device="cpu").fingerprint != hidden, (
        "a tensor that is no buffer"
    )
    (package / "helper.py").write_text("GAIN = 2\n")
    assert own_backbone(named("mean"), device="cpu").fingerprint != first, (
        "another file of the package"
    )


def test_sites_with_the_same_own_backbone_learn_together_and_another_one_is_left_out(
    package: Path, tmp_path: Path
) -> None:
    nodes = [hospital(tmp_path, f"site-{name}", backbone=named("mean")) for name in "ab"]
    nodes.append(hospital(tmp_path, "site-other", backbone=named("hidden")))
    folder = run_federation(
        tmp_path, nodes, backbone="own", **{"head.min-steps": 200, "fedpft.covariance": "spherical"}
    )
    assert "fingerprint" in outcome(folder, "site-other", "rejected")
    right = metrics_of(folder)["accuracy"]["per_site"]
    assert right["site-a"] == right["site-b"] == 1.0


def test_the_reason_of_a_failing_own_backbone_stays_at_the_site(
    package: Path, tmp_path: Path
) -> None:
    nodes = [hospital(tmp_path, f"site-{name}", backbone=named("mean")) for name in "ab"]
    nodes.append(hospital(tmp_path, "site-c", backbone=named("fails")))
    folder = run_federation(tmp_path, nodes, backbone="own", **{"head.min-steps": 20})
    assert (
        outcome(folder, "site-c", "rejected")
        == "the site cannot load the backbone, or its weights do not fit"
    )
    assert not any(word in str(events_of(folder)) for word in ("secret", PACKAGE))
    with pytest.raises(RunError):
        run_federation(tmp_path, nodes[2:], backbone="own")
