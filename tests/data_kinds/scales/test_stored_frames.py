"""What learns again from a run's stored messages, each in the frame of its site's own columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedsurrogate as fs
from fedsurrogate.common.signed_models.signed_model import settings_of_run
from fedsurrogate.server_app.refit import refit
from fedsurrogate.server_app.runs.reader import read_payloads
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
    again = refit(folder)[1]
    narrow = refit(folder, classes=list(again.header.classes))[1]
    for model in (again, narrow):
        found = model.scores(tested).argmax(1)
        assert [again.header.classes[each] for each in found.tolist()] == list(map(str, wanted))
