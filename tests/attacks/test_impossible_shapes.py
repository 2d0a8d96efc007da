"""A tensor without entries may have a side that torch cannot count to: every reader of a file, or a
text, of somebody else refuses it as it refuses any other damage.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.signed_models.signed_model import unpack_gaussians
from fedsurrogate.common.wire import generator_files
from fedsurrogate.common.wire.model_proto import load_model
from fedsurrogate.strategies.pooling import class_means
from fedsurrogate.strategies.pooling.class_means import read_public

READERS: dict[str, Callable[[Path], object]] = {
    "features of a site": lambda file: load(
        DataSource("safetensors", str(file.parent), ("some",)), 0
    ),
    "Gaussians in a message": lambda file: unpack_gaussians(
        base64.b64encode(file.read_bytes()).decode()
    ),
    "a generator": generator_files._tensors,
    "a model": load_model,
    "a projection": lambda file: class_means._read(str(file)),
    "public features": lambda file: read_public(str(file)),
}


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sides=st.lists(st.sampled_from([2**63, 2**64 - 1, 2**63 - 1, 3, 0]), max_size=2),
    name=st.sampled_from(["x", "projection", "weight"]),
)
def test_a_shape_that_torch_cannot_hold_is_refused_like_any_other_damage(
    tmp_path: Path, reader: str, sides: list[int], name: str
) -> None:
    impossible = {"dtype": "F32", "shape": [0, *sides, 2**63], "data_offsets": [0, 0]}
    header = json.dumps({name: impossible, "y": impossible}).encode()
    file = tmp_path / "some-train.safetensors"
    for path in (file, tmp_path / "some.safetensors"):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FedSurrogateError):
        READERS[reader](file)
