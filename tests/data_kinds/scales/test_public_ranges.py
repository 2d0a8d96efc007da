"""Public ranges of columns, where nothing of a site alone may show: sums and models are those of the
columns before any change of their scale and offset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.fedpft.surrogate import fedpft_surrogate
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import class_moments, class_sums
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.mixtures import Frame, PublicMap
from fedsurrogate.common.wire.records import pack_surrogate
from fedsurrogate.common.wire.surrogate_proto import pack_map
from fedsurrogate.strategies.fedpft.strategy import FedPFT
from tests.data_kinds.scales.affine import DIMENSION, records

BUDGET: dict[str, Any] = {"epsilon": 30.0, "delta": 1e-5, "classes": "0,1,2"}
SECURE: dict[str, Any] = {"secure_aggregation": True, "dropouts": 0.0, "classes": "0,1,2"}
CLASSES = ("0", "1", "2")
# Single precision next to offsets of thirty times the scale, over hundreds of records.
NEAR: dict[str, float] = {"rtol": 1e-4, "atol": 5e-3}


def ranges_of(scale: Tensor, offset: Tensor) -> str:
    """Text of the ranges of columns that were within -8 and 8."""
    pairs = zip(scale.tolist(), offset.tolist(), strict=True)
    return "; ".join(f"{o - 8 * s!r},{o + 8 * s!r}" for s, o in pairs)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scales and offsets that single precision can hold next to each other."""
    powers = draw(st.lists(st.floats(-6, 6), min_size=DIMENSION, max_size=DIMENSION))
    shifts = draw(st.lists(st.floats(-30, 30), min_size=DIMENSION, max_size=DIMENSION))
    scale = 10 ** torch.tensor(powers, dtype=torch.float64)
    return scale, scale * torch.tensor(shifts, dtype=torch.float64)


def job_of(run: Run, features: Tensor, labels: Tensor, payload: bytes | None = None) -> Job:
    """A site with these records."""
    train = LabelledFeatures(features.float(), labels)
    empty = LabelledFeatures(features[:0].float(), labels[:0])
    found = SiteFeatures(train, empty, CLASSES, "f" * 16, 0.0, simulated=True)
    return Job(run, NodeConfig(), "north", found, payload=payload)


@settings(max_examples=25, deadline=None)
@given(change=changes(), private=st.booleans())
def test_sums_are_those_of_the_unchanged_columns(
    change: tuple[Tensor, Tensor], private: bool
) -> None:
    clean, labels = records()
    scale, offset = change
    flat: dict[str, Scalar] = {"method": "fedpft", "classes": "0,1,2", "secure-aggregation": True}
    flat |= {"epsilon": 8.0, "delta": 1e-5} if private else {}
    found = []
    for features, text in (
        (clean, "-8,8"),
        (clean * scale + offset, ranges_of(scale, offset)),
    ):
        run = parse_run(flat | {"features.ranges": text})
        found.append(class_moments(job_of(run, features, labels, pack_map(PublicMap()))).values)
    assert found[0].keys() == found[1].keys() == {"counts", "sums", "squares"}
    # The oracle: what a person does by hand.
    by_hand = clean.double() / (8 * (DIMENSION**0.5 if private else 1))
    if private:
        by_hand = clip(by_hand, 0.0)[0]
    torch.testing.assert_close(found[0]["sums"], class_sums(by_hand, labels, 3)[1], **NEAR)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], **NEAR)


RUNS: dict[str, dict[str, Any]] = {
    "fedpft, private": {"method": "fedpft"} | BUDGET,
    "fedpft, theorem": {"method": "fedpft", "fedpft__privacy": "theorem-4.1"} | BUDGET,
    "fedpft, secure": {"method": "fedpft"} | SECURE,
    "fedpft, both": {"method": "fedpft"} | SECURE | BUDGET,
    "fedavg": {"method": "fedavg"} | SECURE,
    "dp-fedavg": {"method": "dp-fedavg"} | BUDGET,
    "dp-fedavg, both": {"method": "dp-fedavg"} | SECURE | BUDGET,
}


@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=5, deadline=None)
@given(change=changes())
def test_each_method_sees_the_unchanged_columns(name: str, change: tuple[Tensor, Tensor]) -> None:
    """Whatever it does with them, and whatever noise it adds: a model in another frame than the
    public one is refused by the site.
    """
    clean, labels = records()
    scale, offset = change
    flat = {key.replace("__", ".").replace("_", "-"): own for key, own in RUNS[name].items()}
    found = []
    for features, text in ((clean, "-8,8"), (clean * scale + offset, ranges_of(scale, offset))):
        job = job_of(parse_run(flat | {"features.ranges": text}), features, labels)
        assert job.public_frame
        found.append(job.training_data(CLASSES, job.public_frame)[0])
    # Under noise, whole rows of columns within their ranges have norm one at most.
    within = 8 * (DIMENSION**0.5 if "epsilon" in RUNS[name] else 1)
    torch.testing.assert_close(found[0], clean / within, **NEAR)
    torch.testing.assert_close(found[1], found[0], **NEAR)


@pytest.mark.parametrize("ranged", [True, False])
def test_a_private_message_in_another_frame_is_refused(ranged: bool) -> None:
    clean, labels = records()
    run = parse_run(
        {"method": "fedpft", "epsilon": 8.0, "delta": 1e-5, "classes": "0,1,2"}
        | ({"features.ranges": "-8,8"} if ranged else {})
    )
    strategy = FedPFT(run)
    sent = strategy.unpack(fedpft_surrogate(job_of(run, clean, labels)).payload)
    assert sent.header.frame == run.public_frame(DIMENSION)
    lying = Frame(torch.ones(DIMENSION).double(), torch.ones(DIMENSION).double()).packed()
    for frame in {lying, b""} - {sent.header.frame}:
        changed = replace(sent, header=replace(sent.header, frame=frame))
        with pytest.raises(SurrogateError, match="frame of columns"):
            strategy.unpack(pack_surrogate(changed))
