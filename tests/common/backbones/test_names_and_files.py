"""Names of backbones and files of weights, before a library is loaded; backbones of the user's own; and
the box of an image that a preset keeps.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from fedsurrogate.common.backbones import backbone_names, backbones, own_backbones
from fedsurrogate.common.backbones.backbone_names import (
    check_backbone_name,
    check_weights_file,
)
from fedsurrogate.common.backbones.backbones import fingerprint_of, frozen_forward
from fedsurrogate.common.backbones.own_backbones import load_own_module, own_backbone, own_head
from fedsurrogate.common.backbones.weight_files import kept_weights, read_weights
from fedsurrogate.common.errors import BackboneError

few = settings(max_examples=40, deadline=None)
NUMBERS = itertools.count()


def test_a_library_that_is_not_installed_is_asked_for_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(backbone_names, "is_installed", lambda name: False)
    monkeypatch.setattr(backbone_names, "check_installed", lambda *words: asked.append(words))
    check_backbone_name("timm:anything", required=False)
    assert asked == []
    check_backbone_name("timm:anything")
    assert asked == [("timm", "backbone = 'timm:anything'")]


def test_a_file_of_weights_has_all_that_its_header_announces(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    for metadata in (None, {"a": "b"}):
        save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, file, metadata)
        check_weights_file(file)
        whole = file.read_bytes()
        headers = b"[]", b"3", b'{"a": 3}', b'{"a": {}}', b"\xff", b'{"a": {"data_offsets": 3}}'
        for content in (
            *(whole[:-1], whole + b"0", whole[:7], b"", (2**63).to_bytes(8, "little") + whole[8:]),
            *(len(text).to_bytes(8, "little") + text for text in headers),
        ):
            file.write_bytes(content)
            with pytest.raises(BackboneError, match=r"is no safetensors file, or is incomplete \("):
                check_weights_file(file)
    for start, fine in (
        (b"PK\x03\x04more", True),
        (b"\x80\x02", True),
        (b"PK", False),
        (b"", False),
    ):
        other = tmp_path / "w.pt"
        other.write_bytes(start)
        if fine:
            check_weights_file(other)
            continue
        with pytest.raises(BackboneError, match="is no torch file"):
            check_weights_file(other)
    with pytest.raises(BackboneError, match="missing': no such file"):
        check_weights_file(tmp_path / "missing")
    with pytest.raises(BackboneError, match="Is a directory"):
        check_weights_file(tmp_path)


# Backbones of the user's own.

HEAD = "import torch\nfrom torch import nn\n"
PLAIN = "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5))\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module and gives its reference."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, function: str = "make", name: str = "") -> str:
        name = name or f"own_package_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return f"python:{name}:{function}"

    yield write
    for name in [each for each in sys.modules if each.startswith("own_package_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"cannot be made \(AttributeError"), ("def make(): raise ValueError('no')", "ValueError: no"),
        ("def make(x): pass", "TypeError"), ("make = 3", "TypeError"), ("def make(): return 3", "returns int"),
        ("def make(): return nn.Flatten(), 3", "returns tuple"),
        ("def make(): return nn.Flatten(), None, None", "returns tuple"),
        ("def make(): return len, nn.Flatten()", "returns tuple"), ("raise OSError('broken')", "OSError: broken"),
    ],
)  # fmt: skip
def test_a_function_that_makes_no_module_is_refused(package: Any, text: str, reason: str) -> None:
    with pytest.raises(BackboneError, match=reason):
        load_own_module(package(text))
    with pytest.raises(BackboneError, match="ModuleNotFoundError"):
        load_own_module("python:own_package_that_is_not_there:make")


def test_random_weights_are_the_same_at_every_call_and_disturb_no_other_numbers(
    package: Any,
) -> None:
    reference = package(PLAIN)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    one, transform = load_own_module(reference)
    assert torch.equal(torch.rand(2), wanted)
    torch.rand(5)
    other, _ = load_own_module(reference)
    assert transform is None
    assert torch.equal(one[1].weight, other[1].weight)  # type: ignore[index]
    torch.manual_seed(0)
    assert torch.equal(one[1].weight, nn.Linear(48, 5).weight)  # type: ignore[index]


def test_the_fingerprint_is_of_weights_structure_and_source(package: Any) -> None:
    def fingerprint(text: str, name: str = "own_package_same", size: int = 4) -> str:
        return own_backbone(package(text, name=name), size, "cpu").fingerprint

    body = (
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Linear(48, 2)\n        self.inner.plain = torch.tensor([{plain}])\n"
        "        self.register_buffer('hidden', torch.tensor([{hidden}]), persistent=False)\n"
        "        import numpy\n        self.array = numpy.array([{array}])\n"
        "    def forward(self, x): return self.inner(x.flatten(1))\n"
        "    def __repr__(self): return '{shown}'\n"
        "def make(): return M()\n"
    )
    usual = {"plain": 1.0, "hidden": 2.0, "array": 3.0, "shown": "M at 0x12ab"}
    with pytest.MonkeyPatch.context() as patch:
        # The source is the same for all, so that only what it makes differs.
        patch.setattr(own_backbones, "_digest_of_sources", lambda reference: "source")
        first = fingerprint(body.format(**usual))
        assert fingerprint(body.format(**usual)) == first
        assert fingerprint(body.format(**usual | {"shown": "M at 0xff"})) == first
        for change in ({"plain": 1.5}, {"hidden": 2.5}, {"array": 3.5}, {"shown": "N"}):
            assert fingerprint(body.format(**usual | change)) != first
        assert fingerprint(body.format(**usual), "own_package_other") != first
    first = fingerprint(PLAIN)
    assert fingerprint(PLAIN) == first
    assert fingerprint(PLAIN + "# more\n") != first


def test_every_source_file_of_a_package_is_in_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "own_package_folder"
    (folder / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/one.py", "deep/two.py"):
        (folder / name).write_text("")
    digest = own_backbones._digest_of_sources
    reference, found = "python:own_package_folder.deep.one:make", set()
    found.add(digest(reference))
    (folder / "deep" / "two.py").write_text("x = 1\n")
    found.add(digest(reference))
    (folder / "deep" / "two.py").rename(folder / "deep" / "three.py")
    found.add(digest(reference))
    (folder / "notes.txt").write_text("no source")
    assert digest(reference) in found
    assert len(found) == 3
    with pytest.raises(BackboneError, match="Python file cannot be found"):
        digest("python:sys:make")
    assert (backbones.ON_CPU, backbones.ON_GPU) == (1e-4, 5e-2)
    assert backbones.PROBES == ((96, 64), (50, 120))


# Heads and weights.


@few
@given(st.integers(0, 20), st.integers(1, 3), st.booleans())
def test_features_are_computed_a_few_images_at_a_time_and_can_be_trained_on(
    images: int, classes: int, pair: bool
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, classes))
    seen: list[int] = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            seen.append(len(x))
            return (model(x), x) if pair else model(x)

    batch = torch.randn(images, 3, 2, 2)
    found = frozen_forward(Counted(), torch.device("cpu"))(batch)
    assert torch.allclose(found, model(batch).detach(), atol=1e-6)
    assert found.dtype == torch.float32
    assert not found.is_inference()
    assert not found.requires_grad
    assert max(seen) <= 8
    assert sum(seen) == images
    assert len(seen) == max(1, -(-images // 8))


def test_training_counters_are_no_weights_and_precision_and_order_change_no_fingerprint() -> None:
    weights = {"b.num_batches_tracked": torch.tensor(3), "a": torch.ones(2), "c": torch.zeros(2)}
    assert list(kept_weights(weights)) == ["a", "c"]
    base = fingerprint_of("n", "p", 3, {"a": torch.ones(2), "c": torch.zeros(2)})
    assert base == fingerprint_of(
        "n", "p", 3, {"c": torch.zeros(2).half(), "a": torch.ones(2).double()}
    )
    for other in (
        fingerprint_of("m", "p", 3, {"a": torch.ones(2), "c": torch.zeros(2)}),
        fingerprint_of("n", "q", 3, {"a": torch.ones(2), "c": torch.zeros(2)}),
        fingerprint_of("n", "p", 4, {"a": torch.ones(2), "c": torch.zeros(2)}),
        fingerprint_of("n", "p", 3, {"a": torch.zeros(2), "c": torch.ones(2)}),
        fingerprint_of("n", "p", 3, {"a": torch.ones(2, 1), "c": torch.zeros(2)}),
        fingerprint_of("n", "p", 3, {"a": torch.ones(2)}),
    ):
        assert other != base
        assert len(other) == 64


def test_a_file_of_weights_holds_tensors_by_name(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    for content in ({"a": torch.ones(2)}, {"state_dict": {"a": torch.ones(2)}, "epoch": 3}):
        torch.save(content, file)
        assert read_weights(file)["a"].tolist() == [1, 1]
    for wrong in ([torch.ones(2)], {"a": 3}, torch.ones(2), {"state_dict": 3}):
        torch.save(wrong, file)
        with pytest.raises(BackboneError, match="holds no state dict"):
            read_weights(file)
    for content in (b"", b"noise", b"PK\x03\x04"):
        file.write_bytes(content)
        with pytest.raises(BackboneError, match=r"w\.pt"):
            read_weights(file)
    with pytest.raises(BackboneError, match="no such file"):
        read_weights(tmp_path / "missing.pt")


MODULE = "class M(nn.Module):\n    n = 0\n    def forward(self, x): "


@pytest.mark.parametrize(
    ("text", "size", "reason"),
    [
        (PLAIN, 0, "has no transform"),
        ("def make(): return nn.Flatten(), lambda image: torch.ones(3, 4, 4)", 4, "set it to 0"),
        ("def make(): return nn.Flatten(), lambda image: torch.ones(3, *image.size)", 0, "for images of two sizes"),
        ("def make(): return nn.Identity()", 4, r"returns shape \(2, 3, 4, 4\)"),
        ("def make(): return nn.Flatten(0)", 4, "returns shape"),
        (f"{MODULE}return x.flatten(1) - x.mean()\ndef make(): return M()", 4, "other images"),
        (f"{MODULE}\n        self.n += 1\n        return x.flatten(1) + self.n\ndef make(): return M()", 4, "call to call"),
        ("def make(): return nn.Sequential(nn.Flatten(), nn.Linear(7, 5))", 4, "does not work on an RGB image"),
        ("def make(): return nn.Sequential(nn.Flatten(), nn.Dropout(0.5))", 4, ""),
        ("def make(): return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())", 4, ""),
        ("def make(): return nn.Flatten(), lambda image: torch.ones(3, 2, 2)", 0, ""),
    ],
)  # fmt: skip
def test_features_depend_on_one_image_alone(
    package: Any, text: str, size: int, reason: str
) -> None:
    if reason:
        with pytest.raises(BackboneError, match=reason):
            own_backbone(package(text), size, "cpu")
        return
    made = own_backbone(package(text), size, "cpu")
    images = [Image.new("RGB", (9, 5), (at, 100, 200)) for at in (0, 250)]
    inputs = torch.stack([made.preprocess(image) for image in images])
    assert made.forward(inputs).shape == (2, made.dim)
    assert torch.equal(made.forward(inputs)[:1], made.forward(inputs[:1]))
    assert (made.name, made.device.type) == ("own", "cpu")


@pytest.mark.parametrize("name", own_backbones.HEADS)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_head_is_found_by_its_name_and_dimension(tmp_path: Path, name: str, prefix: str) -> None:
    file = tmp_path / "w.safetensors"
    weight = torch.arange(6.0).reshape(2, 3)
    save_file({prefix + name: weight, "other": torch.ones(1)}, file)
    found = own_head("any", str(file), 3)
    assert found is not None
    assert found.dtype == torch.float64
    assert torch.equal(found, weight.double())
    assert own_head("any", str(file), 2) is None
    for wrong in (weight.flatten(), weight[None], weight * float("nan")):
        save_file({prefix + name: wrong.contiguous()}, file)
        assert own_head("any", str(file), 3) is None
    file.write_bytes(b"")
    assert own_head("any", str(file), 3) is None
    assert own_head("any", str(tmp_path / "missing"), 3) is None
