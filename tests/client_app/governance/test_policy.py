"""A policy file: missing settings have safe defaults, and a mistake is reported, never guessed at."""

import hashlib
import logging
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.policy import (
    DEFAULT,
    IN_FORCE,
    LARGER,
    MORE,
    PUBLIC_DATA,
    SMALLER,
    Policy,
    digest_of_policy,
    load_policy,
    loosened,
    note_policy,
    policy_of,
)
from fedsurrogate.client_app.governance.work_limits import WorkLimits
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, PolicyError
from fedsurrogate.common.settings import DataKind
from fedsurrogate.common.settings.base import parse_settings
from tests.grid import ROOT


class Lines(logging.Handler):
    """What a log gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


@contextmanager
def site_log() -> Iterator[list[str]]:
    """The lines of the site's log."""
    log, handler = logging.getLogger("fedsurrogate.site"), Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


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


def test_the_policy_file_of_the_kit_states_ten_defaults_on_a_page() -> None:
    """Its comment says so, and hospitals start from this file."""
    file = ROOT / "deploy" / "kit" / "policy.toml"
    assert load_policy(str(file)) == DEFAULT
    assert len(tomllib.loads(file.read_text())) == 10
    assert len(file.read_text().splitlines()) <= 30


def test_limits_of_work_stand_in_a_file_of_their_own_and_costs_do_not(tmp_path: Path) -> None:
    """A person reads one page; an earlier version had both in one file."""
    policy = written(tmp_path, "epsilon-total = 2.0")
    limits = tmp_path / "limits.toml"
    assert load_policy(policy) == Policy(epsilon_total=2.0)
    alone = digest_of_policy(NodeConfig(policy=policy))
    limits.write_text("most-rounds = 7\ncache-mib = 5")
    assert load_policy(policy) == Policy(epsilon_total=2.0, most_rounds=7, cache_mib=5.0)
    assert digest_of_policy(NodeConfig(policy=policy)) not in ("", alone)
    limits.write_text("without-dp = true")
    with pytest.raises(
        ConfigError, match=r"limits.toml': without-dp: no limit of work.*policy.toml'"
    ):
        load_policy(policy)
    limits.write_text("most-rounds = 0")
    with pytest.raises(ConfigError, match=r"limits.toml': most-rounds = 0: must be"):
        load_policy(policy)
    limits.unlink()
    limits.mkdir()
    with pytest.raises(PolicyError, match=r"limits.toml' cannot be read"):
        load_policy(policy)
    limits.rmdir()
    old = written(tmp_path, "most-rounds = 7\nepsilon-total = 2.0\ncache-mib = 5")
    with pytest.raises(
        ConfigError, match=r"most-rounds, cache-mib: limits of work stand in .*/limits.toml' now"
    ):
        load_policy(old)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {"without_dp": True}, "without-dp = true (was false)"),
        ({}, {"epsilon_per_run": 2.0}, "epsilon-per-run = 2 (was 1)"),
        ({"delta_total": 1.5e-5}, {}, "delta-total = 0 (was 1.5e-05)"),
        ({"local_epsilon": 1.0}, {}, "local-epsilon = 0 (was 1)"),
        ({"require_officer": True}, {}, "require-officer = false (was true)"),
        ({}, {"smallest_class": 1}, "smallest-class = 1 (was 10)"),
        ({"mechanisms": ("sums",)}, {"mechanisms": ("sums", "dp-em")}, "mechanisms = sums, dp-em (was sums)"),
        ({}, {"mechanisms": ("*",)}, "mechanisms = * (was sums, dp-em, dp-sgd, counts)"),
    ],
)  # fmt: skip
def test_what_a_policy_loosens_is_named_and_the_way_back_is_none(
    before: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    one, other = Policy(**before), Policy(**now)
    assert loosened(one, other) == [words]
    assert loosened(other, one) == loosened(one, one) == []


def test_each_rule_of_a_policy_loosens_or_is_known_not_to() -> None:
    """A new key is a decision: whether more may leave where it is larger, or smaller."""
    neither = {"methods", "backbones", "smallest_site", "largest_payload_mib", "approvers"}
    assert {*LARGER, *SMALLER, *MORE} | neither == (
        Policy.model_fields.keys() - WorkLimits.model_fields.keys()
    )


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


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_policy(written(tmp_path, "epsilon-totl = 2\nsmallest-class = 0"))
    assert "epsilon-totl" in str(error.value)
    assert "smallest-class" in str(error.value)


def test_a_file_saved_by_a_windows_editor_is_read(tmp_path: Path) -> None:
    assert (
        load_policy(written(tmp_path, "smallest-class = 20\r\n", "utf-8-sig")).smallest_class == 20
    )


@pytest.mark.parametrize(
    "name", ["gone.toml", ".", "nul\0.toml", "latin.toml", "", "~no-such-user/p.toml"]
)
def test_a_policy_that_cannot_be_read_is_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.toml").write_bytes('methods = ["caf\u00e9"]'.encode("latin-1"))
    with pytest.raises(PolicyError, match="nothing leaves without it"):
        load_policy(name)


# By key the smallest and the largest value that a policy may have; None where a key has no largest.
# Where the smallest is itself too small, it stands with the next number.
TINY = 5e-324
WHOLE = (
    "most-classes", "longest-class-name", "largest-image-size", "largest-dimension", "largest-width",
    "most-components", "largest-rank", "most-synthetic", "most-numbers", "most-rounds", "most-steps",
    "most-passes", "requests-per-run", "requests-per-hour", "extractions-per-day", "smallest-class",
    "smallest-cell",
)  # fmt: skip
BOUNDS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(WHOLE, (1, None)),
    **dict.fromkeys(("most-seconds", "cache-mib", "kept-mib"), (TINY, None)),
    **dict.fromkeys(("epsilon-per-run", "epsilon-total"), (TINY, 1e6)),
    "delta": (TINY, 0.01),
    "delta-total": (0.0, 0.1),
    "smallest-site": (0, None),
    "largest-payload-mib": (TINY, 4096.0),
    "smallest-sum": (2, None),
    "smallest-colluding": (0.0, math.nextafter(1.0, 0.0)),
    "local-epsilon": (0.0, 1e6),
    "require-approval": (0, 20),
    "largest-attack-auc": (0.5, 1.0),
    "smallest-nearest-ratio": (0.0, 1.0),
}


def test_each_number_of_a_policy_is_taken_up_to_its_bounds_and_not_beyond() -> None:
    numbers = {
        name.replace("_", "-")
        for name, field in Policy.model_fields.items()
        if field.annotation in (int, float)
    }
    assert numbers == BOUNDS.keys()
    for key, (least, most) in BOUNDS.items():
        name = key.replace("-", "_")
        whole = Policy.model_fields[name].annotation is int
        small = {"delta-total": 0.0} if key == "delta" else {}
        for value, beyond in ((least, -1), (most, 1)):
            if value is None:
                assert parse_settings(Policy, {key: 10**15 if whole else 1e15})
                continue
            assert getattr(parse_settings(Policy, {key: value} | small), name) == value
            further = value + beyond if whole else math.nextafter(value, beyond * math.inf)
            with pytest.raises(ConfigError, match=f"^{key} = "):
                parse_settings(Policy, {key: further} | small)
        # Nothing exceeds it.
        with pytest.raises(ConfigError, match=f"^{key} = "):
            parse_settings(Policy, {key: math.nan} | small)
    with pytest.raises(ConfigError, match=r"^approvers = ''"):
        parse_settings(Policy, {"approvers": ""})


@given(
    delta=st.floats(1e-9, 0.01),
    total=st.sampled_from([0.0, 0.5, 1.0, 1 + 1e-9, 2.0]),
)
def test_the_delta_of_all_runs_is_above_that_of_one(delta: float, total: float) -> None:
    chosen = {"delta": delta, "delta-total": total * delta}
    if 0 < total * delta <= delta:
        with pytest.raises(ConfigError, match=r"delta-total = .*: must be above delta = "):
            parse_settings(Policy, chosen)
    else:
        assert parse_settings(Policy, chosen).delta_total == total * delta


@given(
    auc=st.sampled_from([0.5, 0.99, 1.0]),
    ratio=st.sampled_from([0.0, 1e-9, 1.0]),
    without=st.booleans(),
)
def test_a_policy_says_what_it_limits(auc: float, ratio: float, without: bool) -> None:
    policy = Policy(
        largest_attack_auc=auc,
        smallest_nearest_ratio=ratio,
        without_dp=without,
        epsilon_per_run=0.5,
        epsilon_total=12.0,
    )
    assert policy.limits_attacks == ((auc, ratio) != (1.0, 0.0))
    assert policy.in_words == "epsilon 0.5 a run, 12 in all; " + (
        "also without privacy" if without else "nothing leaves without privacy"
    )


@pytest.mark.parametrize("data", ["", *get_args(DataKind)])
def test_only_public_data_have_no_limits_without_a_policy(tmp_path: Path, data: Any) -> None:
    node = NodeConfig(data=data)
    assert policy_of(node) == (PUBLIC_DATA if data in ("", "digits") else DEFAULT)
    file = written(tmp_path, "smallest-class = 3")
    assert policy_of(node.model_copy(update={"policy": file})) == Policy(smallest_class=3)


@given(
    contents=st.lists(st.sampled_from(["", "smallest-class = 3", "without-dp = true"]), max_size=6)
)
@settings(max_examples=30, deadline=None)
def test_a_log_names_each_policy_once_when_it_comes_into_force(contents: list[str]) -> None:
    with TemporaryDirectory() as name, site_log() as lines:
        folder = Path(name)
        node = NodeConfig(policy=str(folder / "policy.toml"), state_dir=str(folder))
        note_policy(node.model_copy(update={"policy": ""}), DEFAULT)
        assert digest_of_policy(node) == ""
        expected, before = [], None
        for text in contents:
            policy = load_policy(written(folder, text))
            note_policy(node, policy)
            digest = hashlib.sha256(text.encode()).hexdigest()
            assert digest_of_policy(node) == digest
            if text != before:
                expected.append(
                    f"policy {node.policy} is in force from now on (sha256 {digest[:16]}): "
                    f"{policy.in_words}"
                )
                expected += [policy.irrevocable] if policy.irrevocable else []
            before = text
        assert lines == expected


def test_a_policy_whose_digest_cannot_be_computed_or_kept_stops_nothing(tmp_path: Path) -> None:
    for policy in (str(tmp_path), f"{tmp_path}/nul\0", "~no-such-user/policy.toml"):
        assert digest_of_policy(NodeConfig(policy=policy)) == ""
    (tmp_path / IN_FORCE).mkdir()
    node = NodeConfig(policy=written(tmp_path, ""), state_dir=str(tmp_path))
    note_policy(node, DEFAULT)
    assert (tmp_path / IN_FORCE).is_dir()
