"""Hospitals with data, a policy and a ledger of their own, whose apps a test can hold just before anything is made."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from client_app.governance.gate import open_ledger
from client_app.governance.ledger import Ledger, dataset_id
from client_app.node_config import parse_node_config
from common.config.flat_settings import parse_overrides
from tests.e2e.processes import until

CLASSES = "cat,dog"
POLICY = "epsilon-per-run = 8.0\nepsilon-total = 16.0\n"


def write_features(folder: Path, seed: int, width: int = 8) -> None:
    """Features (600, width) of records of two classes, far apart, with a split in the files."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(600) % 2
    centres = torch.tensor([[3.0, 0.0], [0.0, 3.0]]).repeat_interleave(width // 2, dim=1)
    features = centres[labels] + torch.randn(600, width, generator=generator)
    folder.mkdir(parents=True)
    for part, rows in (("train", slice(0, 500)), ("test", slice(500, 600))):
        content = {"x": features[rows].contiguous(), "y": labels[rows].contiguous()}
        save_file(content, folder / f"f-{part}.safetensors", {"classes": CLASSES, "fingerprint": "f" * 16})


class Hospital:
    """One site: its folders below `home`, its node-config, what it has charged. A person has opened its ledger.

    The policy is the first thing an app reads before it makes a release. `hold` puts a pipe in its place, so that the app
    waits there for as long as a test wants, alive, as on a disk that does not answer.
    """

    def __init__(self, home: Path, name: str, seed: int, width: int = 8) -> None:
        self.name, self.home = name, home / name
        self.state, self.policy_file = self.home / "state", self.home / "policy.toml"
        write_features(self.home / "data", seed, width)
        self.policy_file.write_text(POLICY)
        self._pipe = -1
        open_ledger(parse_node_config(parse_overrides([self.node_config])))

    @property
    def node_config(self) -> str:
        """What its SuperNode is started with."""
        return (
            f'site="{self.name}" data="safetensors" data-dir="{self.home}/data" dataset="f" '
            f'cache-dir="{self.home}/cache" state-dir="{self.state}" policy="{self.policy_file}"'
        )

    def charges(self) -> list[dict[str, Any]]:
        """What its ledger, checked, says has left, oldest first."""
        ledger = Ledger(self.state / "ledgers", dataset_id("safetensors", str(self.home / "data")))
        return [entry for entry in ledger.entries() if entry["kind"] == "release"]

    def hold(self) -> None:
        """Let the next app stop before it makes anything."""
        self.policy_file.unlink()
        os.mkfifo(self.policy_file)

    def await_app(self) -> None:
        """Until an app stands at the held policy."""
        until(self._stands)

    def let_go(self) -> None:
        """Let the app that stands there, and those after it, go on."""
        plain = self.policy_file.with_suffix(".new")
        plain.write_text(POLICY)
        plain.replace(self.policy_file)
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, POLICY.encode())
            os.close(self._pipe)
            self._pipe = -1

    def _stands(self) -> bool:
        try:
            self._pipe = os.open(self.policy_file, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        return True
