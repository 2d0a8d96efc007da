"""Pixels in colour have three times the dimension of grey ones, wherever it is counted before there
are features.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsurrogate.client_app.governance.policy import DEFAULT
from fedsurrogate.client_app.governance.work_limits import check_size, check_work
from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.costs import find_dimension
from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.run import parse_run

NAMES = st.sampled_from(["pixels", "pixels:rgb"])


def made(name: str, side: int) -> int:
    """The dimension of the features that the backbone gives for an image in colour."""
    backbone = load_backbone(name, image_size=side)
    image = Image.new("RGB", (side + 3, side), (10, 200, 30))
    features = backbone.forward(backbone.preprocess(image)[None])
    assert backbone.dim == features.shape[1]
    return int(features.shape[1])


@given(NAMES, st.integers(2, 24))
@settings(max_examples=30)
def test_the_dimension_that_is_planned_is_that_of_the_features(name: str, side: int) -> None:
    run = parse_run({"backbone": name, "image-size": side})
    assert find_dimension(run.settings) == made(name, side)


@given(NAMES, st.integers(2, 24), st.integers(-1, 0))
@settings(max_examples=40)
def test_a_site_refuses_a_dimension_before_and_after_it_has_features_alike(
    name: str, side: int, spare: int
) -> None:
    dimension = made(name, side)
    run = parse_run({"backbone": name, "image-size": side, "classes": "a,b"})
    limits = DEFAULT.model_copy(update={"largest_dimension": dimension + spare})
    for check in (
        lambda: check_work(run.plan.work(2, 0), limits, run.settings),
        lambda: check_size(run.plan.work(2, dimension), limits, dimension, 2),
    ):
        if spare < 0:
            with pytest.raises(PolicyError, match="largest-dimension"):
                check()
        else:
            check()
