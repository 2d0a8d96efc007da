"""Weights of a backbone that someone else has made: they run no code, take no more memory than the
file has bytes, and have finite numbers, or the file is refused as such.
"""

import pickle
import resource
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.backbones.backbones import load_backbone, load_network
from fedsurrogate.common.backbones.weight_files import read_weights
from fedsurrogate.common.errors import BackboneError

NAME = "torchvision:shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    from torchvision.models import shufflenet_v2_x0_5

    torch.manual_seed(0)
    return dict(shufflenet_v2_x0_5(weights=None).state_dict())


class Code:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


@pytest.mark.filterwarnings("ignore:Detected pickle")
@pytest.mark.parametrize("write", [torch.save, lambda x, file: file.write_bytes(pickle.dumps(x))])
def test_code_in_a_file_of_weights_does_not_run(tmp_path: Path, write: Callable[..., Any]) -> None:
    file = tmp_path / "weights.pt"
    write({"conv1.0.weight": Code(tmp_path / "ran")}, file)
    with pytest.raises(BackboneError, match="could run any code"):
        load_network(NAME, str(file))
    assert not (tmp_path / "ran").exists()


def packed(source: Path, target: Path, times: int) -> None:
    """The same torch file, compressed or with its members listed several times."""
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(
            target, "w", zipfile.ZIP_DEFLATED if times == 1 else zipfile.ZIP_STORED
        ) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member.filename))
        new.filelist += new.filelist * (times - 1)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("times", [1, 3])
def test_a_small_file_that_unpacks_to_much_is_refused_before_it_is(
    tmp_path: Path, times: int
) -> None:
    torch.save({"conv1.0.weight": torch.zeros(2**26)}, tmp_path / "plain.pt")
    packed(tmp_path / "plain.pt", tmp_path / "bomb.pt", times)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BackboneError, match="packed and larger than the file"):
        load_network(NAME, str(tmp_path / "bomb.pt"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17


@settings(max_examples=20, deadline=None)
@given(packed=st.sets(st.integers(0, 9)), seed=st.integers(0, 99))
def test_a_torch_file_with_any_packed_member_is_refused_also_where_it_gains_nothing(
    packed: set[int], seed: int
) -> None:
    """How much is unpacked is then a statement of the file, which no reader has to take."""
    numbers = torch.rand(4000, generator=torch.Generator().manual_seed(seed))
    with tempfile.TemporaryDirectory() as folder:
        plain, file = Path(folder, "plain.pt"), Path(folder, "file.pt")
        torch.save({"w": numbers}, plain)
        with zipfile.ZipFile(plain) as old, zipfile.ZipFile(file, "w") as new:
            members = old.infolist()
            chosen = {number % len(members) for number in packed}
            for number, each in enumerate(members):
                how = zipfile.ZIP_DEFLATED if number in chosen else zipfile.ZIP_STORED
                new.writestr(each.filename, old.read(each.filename), how)
            assert sum(each.file_size for each in members) < plain.stat().st_size
        if chosen:
            with pytest.raises(BackboneError, match="packed and larger than the file"):
                read_weights(file)
        else:
            assert torch.equal(read_weights(file)["w"], numbers)


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "without memory": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "not a number": lambda x: x * float("nan"),
    "infinite": lambda x: x + float("inf"),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "one number for all": lambda x: torch.zeros(1).expand(10**12),
}


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=12, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(STRANGE)))
def test_strange_tensors_are_refused_with_their_names(
    tmp_path_factory: pytest.TempPathFactory,
    weights: dict[str, Tensor],
    data: st.DataObject,
    kind: str,
) -> None:
    name = data.draw(
        st.sampled_from([key for key, value in sorted(weights.items()) if value.ndim == 4])
    )
    file = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(weights | {name: STRANGE[kind](weights[name])}, file)
    with pytest.raises(BackboneError, match=name):
        load_backbone(NAME, str(file), 64, "cpu")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_precision_are_read(
    tmp_path: Path, weights: dict[str, Tensor], kind: torch.dtype
) -> None:
    torch.save(
        {k: v.to(kind) if v.is_floating_point() else v for k, v in weights.items()},
        tmp_path / "weights.pt",
    )
    assert load_backbone(NAME, str(tmp_path / "weights.pt"), 64, "cpu").dim == 1024
