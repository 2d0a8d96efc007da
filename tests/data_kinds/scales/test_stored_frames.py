"""What learns again from a run's stored messages, each in the frame of its site's own columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.common.signed_models.making import settings_of_run
from fedsurrogate.server_app.relearn import relearn
from fedsurrogate.server_app.report.site_distances import site_map_of
from fedsurrogate.server_app.runs.reader import read_payloads, read_run
from fedsurrogate.strategies import stored_strategy
from tests.data_kinds.scales.affine import RECORDS, records


@pytest.mark.parametrize(
    "own",
    [{"fedpft__covariance": "lowrank"}, {"fedpft__covariance": "gram"}],
    ids=lambda own: str(next(iter(own.values()))),
)
def test_models_from_stored_messages_are_those_of_the_run(
    own: dict[str, Any], tmp_path: Path
) -> None:
    clean, labels = records()
    # Each site has an offset of its own, and so another frame.
    features = clean + 1e4
    parts = [(features[site:RECORDS:3] + 3.0 * site, labels[site:RECORDS:3]) for site in range(3)]
    done = fs.simulate(
        parts, test=(features[RECORDS:], labels[RECORDS:]), output_dir=str(tmp_path), **own
    )
    folder, tested = Path(done.folder), features[RECORDS:] + 3.0
    config = settings_of_run(folder)
    strategy = stored_strategy(config)(config)
    sent = [strategy.unpack(payload) for payload in read_payloads(folder)]
    assert len({each.header.frame for each in sent} - {b""}) == 3
    wanted = done.model.predict(tested).tolist()
    assert len(set(wanted)) == 3
    again = relearn(folder)[1]
    narrow = relearn(folder, classes=list(again.header.classes))[1]
    for model in (again, narrow):
        found = model.scores(tested).argmax(1)
        assert [again.header.classes[each] for each in found.tolist()] == list(map(str, wanted))


def test_a_map_of_sites_is_that_of_the_features_without_their_offset(tmp_path: Path) -> None:
    clean, labels = records()

    def distances(offset: float) -> Tensor:
        """Of three sites that differ by an offset of their own."""
        parts = [
            (clean[own] + offset + 3.0 * site, labels[own])
            for site, own in enumerate(torch.arange(RECORDS).chunk(3))
        ]
        done = fs.simulate(parts, fedpft__covariance="gram", output_dir=str(tmp_path / str(offset)))
        found = site_map_of(read_run(Path(done.folder)), Path(done.folder))
        assert found is not None
        return found.distances

    plain = distances(0.0)
    assert plain.max() > 1.0
    torch.testing.assert_close(distances(1e4), plain, rtol=0.1, atol=0.05)
