"""Hospitals with their own data, policy and ledger; a test can hold their apps just before they
make a release.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.gate import open_ledger
from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.settings.base import parse_overrides
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
        save_file(
            content, folder / f"f-{part}.safetensors", {"classes": CLASSES, "fingerprint": "f" * 16}
        )


class Hospital:
    """One site: its folders below `home`, its node-config, its charges. A person has opened its
    ledger.

    For each request, an app reads the policy first. `hold` replaces the policy with a pipe, so that
    the app waits there as long as a test wants. It stays alive, as with a disk that does not
    respond.
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
        """The node-config of its SuperNode."""
        return (
            f'site="{self.name}" data="safetensors" data-dir="{self.home}/data" dataset="f" '
            f'cache-dir="{self.home}/cache" state-dir="{self.state}" policy="{self.policy_file}"'
        )

    def charges(self) -> list[dict[str, Any]]:
        """The charges in its verified ledger, oldest first."""
        ledger = Ledger(self.state / "ledgers", dataset_id("safetensors", str(self.home / "data")))
        return [entry for entry in ledger.entries() if entry["kind"] == "release"]

    def hold(self) -> None:
        """Make the next app wait before it answers."""
        self.policy_file.unlink()
        os.mkfifo(self.policy_file)

    def introduce(self, introduced: Callable[[], bool]) -> None:
        """Let waiting apps answer until the site has introduced itself; a later one waits again."""

        def done() -> bool:
            if self._stands() and not introduced():
                # Later apps wait at another pipe, before this one's app reads to its end.
                os.mkfifo(following := self.policy_file.with_suffix(".new"))
                following.replace(self.policy_file)
                self._answer()
            return introduced()

        until(done)

    def await_app(self) -> None:
        """Wait until an app waits at the held policy."""
        until(self._stands)

    def let_go(self) -> None:
        """Let the waiting app, and all later apps, continue."""
        plain = self.policy_file.with_suffix(".new")
        plain.write_text(POLICY)
        plain.replace(self.policy_file)
        if self._pipe >= 0:
            self._answer()

    def _answer(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, POLICY.encode())
        os.close(self._pipe)
        self._pipe = -1

    def _stands(self) -> bool:
        if self._pipe >= 0:
            return True
        try:
            self._pipe = os.open(self.policy_file, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        return True
