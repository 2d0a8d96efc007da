"""A policy file: missing settings have safe defaults, and a mistake is reported, never guessed at."""

import tomllib
from pathlib import Path

import pytest

from fedsurrogate.client_app.governance.policy import DEFAULT, PUBLIC_DATA, Policy, load_policy
from fedsurrogate.common.errors import ConfigError, PolicyError
from tests.grid import ROOT


def written(folder: Path, text: str, encoding: str = "utf-8") -> str:
    file = folder / "policy.toml"
    file.write_text(text, encoding)
    return str(file)


def test_a_policy_file_is_read_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    text = (
        'methods = ["fedpft", "fedlap"]\nbackbones = "torchvision:*, pixels"\nepsilon-total = '
        "2\nwithout-dp = true\n"
    )
    policy = load_policy(written(tmp_path, text))
    assert policy == Policy(
        methods=("fedpft", "fedlap"),
        backbones=("torchvision:*", "pixels"),
        epsilon_total=2.0,
        without_dp=True,
    )
    assert load_policy(written(tmp_path, "")) == DEFAULT


def test_by_default_nothing_leaves_without_privacy_nor_by_the_mechanism_that_protects_less() -> (
    None
):
    assert not DEFAULT.without_dp
    assert "theorem-4.1" not in DEFAULT.mechanisms
    assert not {"none", "*"} & set(DEFAULT.mechanisms)
    assert (DEFAULT.epsilon_per_run, DEFAULT.epsilon_total, DEFAULT.delta) == (1.0, 4.0, 1e-5)
    assert (DEFAULT.smallest_class, DEFAULT.largest_payload_mib) == (10, 256.0)
    assert PUBLIC_DATA.without_dp


def test_the_policy_file_of_the_kit_states_every_default() -> None:
    """Its comment says so, and hospitals start from this file."""
    file = ROOT / "deploy" / "kit" / "policy.toml"
    assert load_policy(str(file)) == DEFAULT
    keys = {name.replace("_", "-") for name in Policy.model_fields}
    assert tomllib.loads(file.read_text()).keys() == keys


def test_every_key_says_what_it_means() -> None:
    assert all(field.description for field in Policy.model_fields.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epsilon-totl = 2", "unknown key 'epsilon-totl'; did you mean 'epsilon-total'?"),
        ("without_dp = true", "unknown key 'without_dp'; did you mean 'without-dp'?"),
        ("[limits]\nepsilon-total = 2", "unknown key 'limits'"),
        ("epsilon-total = -1", "epsilon-total = -1.0: must be greater than 0"),
        ("epsilon-total = true", "epsilon-total = True: must be a number"),
        ("delta = 0.5", "delta = 0.5: must be less than or equal to 0.01"),
        ("without-dp = 1", "without-dp = 1: must be true or false"),
        ("smallest-class = 0", "smallest-class = 0: must be greater than or equal to 1"),
        ("smallest-class = 10.0", "smallest-class = 10.0: must be a whole number"),
        ("methods = [1]", "methods = [1]: must be a list of texts"),
        ("methods = []", "methods = []: must be a list of texts, at least one"),
        ('methods = ["fedpft", "fedpft"]', "a name stands twice"),
        ("delta = 1e-5\ndelta = 1e-3", "is not a TOML file"),
        ("methods", "is not a TOML file"),
    ],
)
def test_a_mistake_in_a_policy_is_named_with_its_file_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_policy(file)
    assert message in str(error.value)
    assert file in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["epsilon-per-run", "epsilon-total", "delta", "largest-payload-mib"]
)
@pytest.mark.parametrize("number", ["nan", "inf", "0"])
def test_no_limit_can_be_switched_off_by_a_number_nothing_exceeds(
    tmp_path: Path, key: str, number: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        load_policy(written(tmp_path, f"{key} = {number}"))


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_policy(written(tmp_path, "epsilon-totl = 2\nsmallest-class = 0"))
    assert "epsilon-totl" in str(error.value)
    assert "smallest-class" in str(error.value)


def test_a_file_saved_by_a_windows_editor_is_read(tmp_path: Path) -> None:
    assert (
        load_policy(written(tmp_path, "smallest-class = 20\r\n", "utf-8-sig")).smallest_class == 20
    )


@pytest.mark.parametrize("name", ["gone.toml", ".", "nul\0.toml", "latin.toml"])
def test_a_policy_that_cannot_be_read_is_no_policy(tmp_path: Path, name: str) -> None:
    (tmp_path / "latin.toml").write_bytes('methods = ["caf\u00e9"]'.encode("latin-1"))
    with pytest.raises(PolicyError, match="nothing leaves without it"):
        load_policy(f"{tmp_path}/{name}")


@pytest.mark.parametrize("file", ["", "~no-such-user/policy.toml"])
def test_a_path_that_is_none_is_no_policy(file: str) -> None:
    with pytest.raises(PolicyError, match="nothing leaves without it"):
        load_policy(file)
