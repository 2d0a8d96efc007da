"""The number of passes that the coordinator makes over all sites does not grow with them, so its
time is linear in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.registrations import Registration, write_table
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, to_record
from fedsurrogate.server_app.deployment.local_engine import FIRST_NODE, LocalGrid
from fedsurrogate.strategies.base.outcome import Outcome, Registered
from fedsurrogate.strategies.fedpft.strategy import FedPFT


class Passes(dict[Any, Any]):
    """A dictionary that counts the loops over it."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        Passes.count += 1
        return super().__iter__()

    def items(self) -> Any:
        Passes.count += 1
        return super().items()

    def values(self) -> Any:
        Passes.count += 1
        return super().values()


def payload(run: str, site: str) -> bytes:
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    table = fit(x, y, 2, MixtureSettings("diag"), torch.Generator())
    return pack_surrogate(Surrogate(Header("fedpft", run, site, "backbone", ("a", "b")), table))


def passes(sites: int, how: str, folder: Path) -> int:
    """Loops over all sites, or over all their receipts, in one run."""
    config = parse_run({"fedpft.covariance": "diag", "output-dir": str(folder)})
    run, names = config.digest, {FIRST_NODE + index: f"s{index}" for index in range(sites)}

    def answer(message: Message, context: Context) -> Message:
        name = names[context.node_id]
        info = {
            "status": "ok",
            "site": name,
            "receipt": f"{'0' * 32}:1:{context.node_id}:{'0' * 64}",
        }
        if message.metadata.message_type != "train":
            return Message(to_record(None, info | {"correct": 1, "tested": 2}), reply_to=message)
        sent = payload(run, name)
        return Message(to_record(sent, info | {"bytes": len(sent)}), reply_to=message)

    strategy = FedPFT(config)
    strategy.outcome = Outcome(sites=Passes())
    strategy.receipts._known, strategy.receipts._nodes = Passes(), Passes()
    Passes.count = 0
    if how == "stored":
        strategy.learn_from([(name, (name, payload(run, name))) for name in names.values()])
    else:
        if how == "registered":
            file = folder / "registered.json"
            folder.mkdir()
            write_table(file, {name: Registration("key", node) for node, name in names.items()})
            strategy.registered = Registered(file)
        strategy.run(LocalGrid(answer, [{}] * sites))
        assert strategy.outcome.sites[FIRST_NODE].tested == 2
    assert strategy.outcome.count("used") == sites
    return Passes.count


@pytest.mark.parametrize("how", ["stored", "claimed", "registered"])
def test_passes_over_all_sites_do_not_grow_with_their_number(how: str, tmp_path: Path) -> None:
    few, many = (passes(sites, how, tmp_path / str(sites)) for sites in (3, 12))
    assert few == many
