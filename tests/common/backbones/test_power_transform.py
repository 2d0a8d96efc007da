"""The power of features: which backbones get one, what it does, and that it travels in the
fingerprint.
"""

import pytest
import torch

from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.backbones.power_transform import power_for, power_in, raised, with_power
from fedsurrogate.common.run import parse_run


def test_signs_stay_and_one_changes_nothing():
    x = torch.tensor([[-4.0, 0.0, 9.0]])
    assert raised(x, 0.5).tolist() == [[-2.0, 0.0, 3.0]]
    assert raised(x, 1.0) is x


@pytest.mark.parametrize(
    ("fingerprint", "power", "wanted"),
    [("ab", 0.5, "ab^0.5"), ("ab", 1, "ab"), ("", 0.5, ""), ("ab^0.5", 0.5, "ab^0.5")],
)
def test_the_fingerprint_holds_the_power(fingerprint, power, wanted):
    assert with_power(fingerprint, power) == wanted
    assert power_in(wanted) == (0.5 if "^" in wanted else 1.0)


@pytest.mark.parametrize(
    "text", ["", "^", "a^b", "features-1280", "a^nan", "a^inf", "a^-1", "a^0", "a^1e300"]
)
def test_other_fingerprints_have_power_one(text):
    assert power_in(text) == 1.0


@pytest.mark.parametrize(
    ("keys", "power"),
    [
        ({}, 0.5),
        ({"epsilon": 1.0}, 1.0),
        ({"epsilon": 1.0, "fedpft.covariance": "spherical", "fedpft.components": 2}, 1.0),
        ({"epsilon": 1.0, "fedpft.covariance": "diag", "fedpft.privacy": "theorem-4.1"}, 1.0),
        ({"epsilon": 1.0, "features.power-transform": 0.5}, 0.5),
        ({"epsilon": 1.0, "method": "dp-fedavg"}, 0.5),
    ],
)
def test_features_that_privacy_clips_stay_as_they_are_unless_the_settings_say_otherwise(
    keys, power
):
    private = {"delta": 1e-5, "classes": "a,b"} if keys.get("epsilon") else {}
    assert parse_run({"backbone": "torchvision:mobilenet_v2"} | private | keys).power == power


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "alexnet", "densenet121", "googlenet", "inception_v3", "mobilenet_v2", "regnet_y_400mf",
        "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "vgg11", "wide_resnet50_2",
        "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t",
        "timm:resnet18", "timm:densenet121", "timm:mobilenetv2_050", "timm:tf_efficientnet_lite0",
        "timm:resnet50d",
    ],
)  # fmt: skip
def test_features_of_backbones_with_power_one_half_are_never_negative(name, tmp_path):
    import timm
    from torchvision import models

    library, _, model = name.rpartition(":")
    library = library or "torchvision"
    torch.manual_seed(0)
    network = models.get_model(model) if library == "torchvision" else timm.create_model(model)
    weights = tmp_path / "weights.pt"
    torch.save(network.state_dict(), weights)
    found = load_backbone(f"{library}:{model}", str(weights), device="cpu")
    features = found.forward(torch.randn(4, 3, found.preprocess.crop, found.preprocess.crop))
    power = power_for(f"{library}:{model}")
    # A model without a power may still end in a ReLU under another name; one with a power must
    # never be negative.
    assert power == 1.0 or float(features.min()) >= 0
    if library == "torchvision":
        assert (power == 0.5) == (float(features.min()) >= 0)


def test_only_features_that_are_never_negative_and_not_clipped_have_a_root() -> None:
    for name, power in (
        ("torchvision:resnet18", 0.5),
        ("timm:vgg16_bn", 0.5),
        ("timm:tf_efficientnet_lite0", 0.5),
        ("timm:tf_efficientnet_lite0.in1k", 0.5),
        ("timm:tf_efficientnet_b0", 1.0),
        ("pixels", 1.0),
        ("timm:vit_b", 1.0),
    ):
        assert power_for(name) == power_for(name, clipped=False) == power
        assert power_for(name, clipped=True) == 1.0
