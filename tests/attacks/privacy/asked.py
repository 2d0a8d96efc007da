"""A hospital with features of its own, which a coordinator asks through its entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.ledger import own_ledger
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.records import INFO, from_record, to_record
from tests.attacks.privacy.visits import close_logs, set_up
from tests.grid import FIRST_NODE, InProcessGrid, Scalar, default_run_config, open_new

RECORDS, DIMENSION, FINGERPRINT = 150, 6, "f" * 16


class Site:
    """A hospital with features of its own, behind its entry point."""

    def __init__(self, home: Path, policy: str, **settings: Scalar) -> None:
        (home / "data").mkdir(parents=True)
        draw = np.random.default_rng(5)
        self.x = torch.from_numpy(draw.normal(size=(RECORDS, DIMENSION))).float()
        content = {
            "x": self.x,
            "y": torch.arange(RECORDS) % 2,
            "time": torch.from_numpy(draw.uniform(0.1, 2.9, RECORDS)),
            "event": torch.ones(RECORDS, dtype=torch.int64),
            "bag": torch.arange(RECORDS) // 10 * 2 + torch.arange(RECORDS) % 2,
            "who": torch.arange(RECORDS) // 30,
        }
        save_file(content, home / "data" / "f.safetensors", {"fingerprint": FINGERPRINT})
        self.node = set_up(home) | {"data": "safetensors", "data-dir": str(home / "data")}
        (home / "policy.toml").write_text(policy)
        self.node |= settings | {"target-columns": "time,event"}
        self.log = home / "state" / "site.log"
        open_new(self.node)
        self.asked = 76

    def entries(self) -> list[dict[str, Any]]:
        """The releases in its ledger."""
        ledger = own_ledger(parse_node_config(self.node))
        assert ledger is not None
        return [entry for entry in ledger.entries() if entry["kind"] == "release"]

    def ask(
        self, settings: dict[str, Scalar], model: Tensors | None = None
    ) -> tuple[str, bytes | None]:
        """The status and payload of its answer in a new run."""
        run = parse_run(default_run_config() | settings)
        payload = None if model is None else _packed(run, model)
        self.asked += 1
        grid = InProcessGrid([self.node], run_id=self.asked)
        grid.run_config = default_run_config() | settings
        info: dict[str, Any] = {"run": run.digest, "round": 1, "lineage": "abc", "confirmed": 0}
        content = to_record(payload, info if payload is None else info | {"bytes": len(payload)})
        (reply,) = grid.pull_messages(grid.push_messages([Message(content, FIRST_NODE, "train")]))
        close_logs()
        status = str(dict(reply.content.config_records[INFO])["status"])
        return status, from_record(reply.content, 2**30)[0] if status == "ok" else None


def _packed(run: Run, model: Tensors) -> bytes:
    assert run.target is not None
    rows = run.target.rows
    return pack_parameters(
        Parameters(Header("fedpft", run.digest, "coordinator", FINGERPRINT, rows), 1, model)
    )
