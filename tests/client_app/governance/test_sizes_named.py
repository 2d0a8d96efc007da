"""The size of a run's tables is that of all classes: of those that it names, and of those of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import PUBLIC_DATA
from fedsurrogate.client_app.governance.release import prepare
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.run import parse_run


@pytest.mark.parametrize("named", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("own", [2, 3, 4])
def test_the_larger_number_of_classes_is_limited(tmp_path: Path, named: int, own: int) -> None:
    names = ["a", "b", "c", "d", "e"]
    labels = torch.arange(12) % own
    save_file(
        {"x": torch.eye(12, 6) + labels[:, None], "y": labels},
        tmp_path / "own.safetensors",
        {"classes": ",".join(names[:own]), "fingerprint": "f"},
    )
    run = parse_run({"classes": ",".join(names[:named]), "fedpft.covariance": "spherical"})
    places: dict[str, Any] = {"data": "safetensors", "data_dir": str(tmp_path)}
    node = NodeConfig(site="s", state_dir=str(tmp_path / "s"), cache_dir=str(tmp_path), **places)
    request = SiteRequest(run, node, "s", flower_run="1")
    # Where a run names classes, those are the site's.
    most = max(named, named or own)
    for limit in (most, most - 1):
        policy = PUBLIC_DATA.model_copy(update={"most_classes": limit})
        gate = Gate(policy, Ledger(tmp_path / "ledger", "a" * 16))
        if limit == most:
            assert prepare(request, gate).found.classes
        elif limit:
            with pytest.raises(
                PolicyError, match=f"most-classes = {limit}: the run requests {most}"
            ):
                prepare(request, gate)
