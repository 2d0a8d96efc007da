"""The gate: the site decides which data may leave, and the coordinator receives only a code."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app.governance.gate import Gate, open_gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import DEFAULT, PUBLIC_DATA, Policy
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import BudgetError, PolicyError
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.run import parse_run
from tests.client_app.governance.ledger_processes import release

PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}


def gate(folder: Path, **policy: Any) -> Gate:
    return Gate(Policy(**policy), Ledger(folder, "data"))


def test_a_policy_that_cannot_be_read_lets_nothing_out(tmp_path: Path) -> None:
    node = NodeConfig(
        data="parquet",
        data_dir=str(tmp_path),
        policy=str(tmp_path / "gone.toml"),
        state_dir=str(tmp_path),
    )
    with pytest.raises(PolicyError, match="nothing leaves without it"):
        open_gate(node, "digits", "1")


def test_the_default_allows_a_private_run_and_public_data_anything(tmp_path: Path) -> None:
    Gate(DEFAULT, Ledger(tmp_path, "data")).check_request(parse_run(PRIVATE))
    public = Gate(PUBLIC_DATA, Ledger(tmp_path, "data"))
    for asked in (
        {},
        PRIVATE | {"epsilon": 50.0, "fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"},
    ):
        public.check_request(parse_run(asked))


@pytest.mark.parametrize("mechanism", ["dp-em", "dp-sgd"])
def test_a_size_that_noise_has_shaped_decides_only_once_it_is_paid_for(
    tmp_path: Path, mechanism: str
) -> None:
    """Otherwise the number of components that stand out, or of zero entries, would be a free
    release.
    """
    strict = gate(tmp_path, largest_payload_mib=1e-6)
    with pytest.raises(PolicyError, match="largest-payload-mib = 1e-06: the release has 10 bytes"):
        strict.let_out(replace(release(), mechanism=mechanism))
    assert len(strict.ledger.entries()) == 1


def test_runs_share_the_total_of_a_data_set(tmp_path: Path) -> None:
    noise = gaussian_noise_multiplier(1.0, 1e-5)
    # Eleven runs of epsilon 1 compose to 3.83 at the same delta, not to 11.
    for number in range(11):
        spent = gate(tmp_path).let_out(release(noise, run=str(number)))
    assert 3.8 < spent < 3.9
    with pytest.raises(BudgetError, match="epsilon-total = 4"):
        gate(tmp_path).let_out(release(noise, run="11"))


def test_small_classes_stay_unless_noise_hides_them(tmp_path: Path) -> None:
    assert [
        gate(tmp_path).smallest_class(name) for name in ("none", "theorem-4.1", "sums", "dp-em")
    ] == [10, 10, 1, 1]


def test_every_simulation_begins_with_a_budget_of_its_own_and_hospital_data_never_does(
    tmp_path: Path,
) -> None:
    run = parse_run(PRIVATE)
    share = NodeConfig(partition_id=1, num_partitions=3, state_dir=str(tmp_path))
    own = NodeConfig(data="parquet", data_dir=str(tmp_path), state_dir=str(tmp_path))
    assert (
        open_gate(share, run.settings.data, "1").ledger.path
        != open_gate(share, run.settings.data, "2").ledger.path
    )
    assert (
        open_gate(own, run.settings.data, "1").ledger.path
        == open_gate(own, run.settings.data, "2").ledger.path
    )
    assert open_gate(own, run.settings.data, "1").policy == DEFAULT
    assert not (tmp_path / "ledgers").exists()
