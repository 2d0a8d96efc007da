"""A survey of images over gRPC: the command names the hospitals whose images are turned or inverted, and
every ledger has one charge.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.children import ok
from tests.e2e.processes import coordinator, federation, site_command
from tests.strategies.counting.image_hospitals import CLASSES, drawn, hospitals


def test_the_command_names_turned_and_inverted_hospitals_and_each_is_charged_once(
    tmp_path: Path,
) -> None:
    configs = [
        " ".join(f'{key}="{value}"' for key, value in own.items())
        for own in hospitals(tmp_path, drawn(400, 1), np.arange(400) % 2)
    ]
    for own in configs:
        ok(site_command("ledger", "open", "--yes", "--node-config", own))
    with federation(tmp_path / "flower", configs) as running:
        words = ("--classes", ",".join(CLASSES), "--images", "all", "--epsilon", "2", "--json")
        settings = f'sites=4 quorum=1.0 deadline=600.0 output-dir="{tmp_path}/out"'
        done = ok(coordinator("survey", *running.control, *words, "-c", settings, cwd=tmp_path))
    found = json.loads(done.stdout)["images"]["warnings"]
    named = {(each["site"], each["histogram"]) for each in found}
    assert named == {("south", "orientation"), ("south", "mirror"), ("east", "brightness")}
    for own in configs:
        shown = site_command("ledger", "show", "--json", "--node-config", own)
        (entry,) = json.loads(shown.stdout)["entries"]
        assert (entry["mechanism"], entry["epsilon"]) == ("counts", 2.0)
