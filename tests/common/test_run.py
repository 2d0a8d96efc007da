"""The settings of a run: one source of defaults, and a one-line message for every mistake."""

import tomllib
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.help import descriptions
from fedsurrogate.common.models.devices import pick_device
from fedsurrogate.common.renamed import GONE_METHODS, GONE_SETTINGS, GONE_VALUES
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import FedPFTSettings, HeadSettings, Settings
from fedsurrogate.common.settings.base import Scalar, known_keys, parse_overrides, settings_text
from fedsurrogate.common.settings.heads import label_sets

TYPED = st.dictionaries(
    st.sampled_from(["seed", "site", "data-dir", "fedpft.rank"]),
    st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
)
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def flatten(table: dict[str, object], section: str = "") -> dict[str, object]:
    """Dotted keys, as Flower flattens [tool.flwr.app.config]."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat |= (
            flatten(value, f"{section}{key}.")
            if isinstance(value, dict)
            else {section + key: value}
        )
    return flat


def published() -> dict[str, object]:
    return flatten(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])


def message(flat: dict[str, Scalar]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(flat)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pyproject_publishes_every_key_with_its_default() -> None:
    defaults = {row.key: row.default for row in descriptions()}
    assert published() == defaults
    assert list(published()) == list(defaults), "in the same order"
    assert {key: type(value) for key, value in published().items()} == {
        k: type(v) for k, v in defaults.items()
    }


def test_the_published_configuration_is_valid_and_the_default() -> None:
    assert parse_run(published()) == Run.resolve(Settings()) == parse_run({})


def test_a_setting_of_earlier_versions_is_passed_over_where_it_asked_for_nothing() -> None:
    nothing = {key: value for key, (value, _) in GONE_SETTINGS.items()}
    assert parse_run(nothing | {"seed": 3}) == parse_run({"seed": 3})
    assert GONE_SETTINGS.keys().isdisjoint(known_keys(Settings))
    asked = [(key, 7, why) for key, (_, why) in GONE_SETTINGS.items()]
    for key, value, why in [*asked, *GONE_VALUES]:
        with pytest.raises(ConfigError) as refused:
            parse_run({key: value})
        assert str(refused.value) == f"{key} = {value!r} asks for what is gone: {why}"


@pytest.mark.parametrize("method", GONE_METHODS)
def test_a_method_that_is_gone_is_refused_with_the_version_that_has_it(method: str) -> None:
    """Whatever its own settings were: these are gone too."""
    stored: dict[str, Scalar] = (
        {"method": method, "seed": 3}
        | {key: value for key, (value, _) in GONE_SETTINGS.items()}
        | {"afl.ridge": 5.0}
    )
    assert message(stored) == (
        f"method = '{method}' is gone: version 0.2.0 is the last that runs it and learns from its "
        "runs; use method = 'fedpft' with fedpft.covariance = 'gram'"
    )


def test_dotted_keys_reach_their_section() -> None:
    config = parse_run(
        {"fedpft.rank": 64, "fedpft.covariance": "full", "head.epochs": 3, "classes": " cat, dog ,"}
    )
    assert config.settings.fedpft == FedPFTSettings(rank=64, covariance="full", bits=16)
    assert config.settings.head == HeadSettings(epochs=3)
    assert config.settings.classes == ("cat", "dog")
    assert config.settings.seed == Settings().seed


def test_whole_numbers_may_stand_for_fractions() -> None:
    assert parse_run({"quorum": 1}).settings.quorum == 1.0


def test_a_budget_turns_privacy_on() -> None:
    assert parse_run({}).plan.mechanism_name == "none"
    budget: dict[str, Scalar] = {"epsilon": 1.0, "delta": 1e-5}
    assert parse_run(budget).plan.mechanism_name == "sums"
    assert parse_run(budget | {"fedpft.components": 2}).plan.mechanism_name == "dp-em"


def test_few_batches_get_more_passes_and_never_fewer_than_asked() -> None:
    settings = HeadSettings(epochs=20, min_steps=1000)
    assert [settings.passes(batches) for batches in (1, 3, 50, 51, 10_000)] == [
        1000,
        334,
        20,
        20,
        20,
    ]
    assert HeadSettings(epochs=2, min_steps=0).passes(1) == 2


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (['method="fedpft" seed=3'], {"method": "fedpft", "seed": 3}),
        (["fedpft.rank=64", "compare=true"], {"fedpft.rank": 64, "compare": True}),
        (["alpha=1e-1  classes='cat, dog'"], {"alpha": 0.1, "classes": "cat, dog"}),
        (['data-dir="/a b/x=y" output-dir=""'], {"data-dir": "/a b/x=y", "output-dir": ""}),
        (["seed=1", "seed=2"], {"seed": 2}),
        (["method=fedpft classes=no,yes"], {"method": "fedpft", "classes": "no,yes"}),
        (["data-dir=/a/b.c site=1st"], {"data-dir": "/a/b.c", "site": "1st"}),
        (["compare=True secure-aggregation=FALSE"], {"compare": True, "secure-aggregation": False}),
        (["dataset=2026-01-31 seed=1e3"], {"dataset": "2026-01-31", "seed": 1e3}),
        ([r'dataset="a \"b\""'], {"dataset": 'a "b"'}),
        ([""], {}),
        ([], {}),
    ],
)
def test_overrides_are_read_as_flower_writes_them(
    texts: list[str], expected: dict[str, Scalar]
) -> None:
    found = parse_overrides(texts)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    "content",
    [
        'seed = 3\nclasses = ["no", "yes"]\n[fedpft]\nrank = 4\n',
        "# as a shell reads it\nseed=3\nclasses=no,yes\nfedpft.rank=4\n",
    ],
)
def test_a_file_holds_settings_and_what_is_typed_after_it_wins(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(content)
    found = parse_overrides(["seed=2 alpha=1.0", str(tmp_path / "run.toml"), "classes=a,b"])
    assert found == {"seed": 3, "alpha": 1.0, "classes": "a,b", "fedpft.rank": 4}


@given(TYPED)
def test_settings_are_read_as_they_are_written(flat: dict[str, Scalar]) -> None:
    """For another process, and for the command that continues a run."""
    assert parse_overrides([settings_text(flat)]) == flat


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed", "cannot read 'seed': it has no ="),
        ("seed = 1", "cannot read 'seed = 1'"),
        ("seed=1 nonsense", "cannot read 'nonsense'"),
        ('classes="a', 'needs quotes: classes="'),
    ],
)
def test_an_override_that_cannot_be_read_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([text])
    assert named in str(caught.value)


def test_digest_does_not_depend_on_who_wrote_the_keys_down_and_how() -> None:
    assert parse_run(published()).digest == parse_run({}).digest
    one, other = (
        {"seed": 7, "classes": "a,b", "fedpft.rank": 4},
        {"fedpft.rank": 4, "classes": " a, b", "seed": 7},
    )
    assert parse_run(one).digest == parse_run(other).digest


@pytest.mark.parametrize("way", [" {}", "{} ", "\ufeff{}", "{}\u200b", "\xa0{}", "{}"])
def test_columns_have_one_name_in_settings_and_tables(way: str) -> None:
    """A column's name in a table is normal, and would otherwise not be found."""
    name = "\xe9l\xe9vation"
    given = way.format(unicodedata.normalize("NFD", name))
    flat: dict[str, Scalar] = {"task": "multilabel", "label-columns": f"b,{given}"}
    settings = parse_run(
        flat | {"label-sets": f"north=b,{given}", "patient-column": given}
    ).settings
    assert settings.label_columns == label_sets(settings.label_sets)["north"] == ("b", name)
    assert settings.patient_column == name


@pytest.mark.parametrize(
    ("images", "network"),
    [
        ({}, "mlp"),
        ({"image-size": 8}, "mlp"),
        ({"image-size": 16}, "convnet"),
        ({"image-size": 32, "backbone": "pixels:rgb"}, "convnet"),
        ({"backbone": "pixels:rgb"}, "mlp"),
        ({"image-size": 224, "backbone": "torchvision:mobilenet_v2"}, "mlp"),
    ],
)
def test_fedlap_takes_the_network_that_the_features_allow(
    images: dict[str, Scalar], network: str
) -> None:
    flat = {"method": "fedlap"} | images
    chosen, named = parse_run(flat), parse_run(flat | {"fedlap.model": network})
    assert chosen == named
    assert chosen.settings.fedlap.kind == network
    assert chosen.digest == named.digest
    for other in {"linear", "mlp", "convnet"} - {network}:
        assert parse_run(flat | {"fedlap.model": other}).settings.fedlap.kind == other


@pytest.mark.parametrize(
    ("case", "images", "descent"),
    [
        ({}, 50, "plain"),
        ({"fedlap.model": "linear"}, 50, "plain"),
        ({"image-size": 16}, 10, "annealed"),
        ({"epsilon": 1.0, "delta": 1e-5, "classes": "a,b"}, 10, "annealed"),
    ],
)
def test_fedlap_sends_fewer_images_with_a_convnet_or_noise(
    case: dict[str, Scalar], images: int, descent: str
) -> None:
    flat = {"method": "fedlap"} | case
    named = {"fedlap.images-per-class": images, "fedlap.descent": descent}
    chosen = parse_run(flat)
    assert chosen == parse_run(flat | named)
    assert chosen.digest == parse_run(flat | named).digest
    other = named | {"fedlap.images-per-class": 3}
    assert parse_run(flat | other).settings.fedlap.images_per_class == 3


def test_device_is_one_this_machine_has() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"device = '{missing}'"):
        pick_device(missing)
