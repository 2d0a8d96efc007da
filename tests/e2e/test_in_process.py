"""A federation in one process, with Flower's own message bytes: the files that a run leaves, and
those it must not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.wire.records import from_record
from tests.grid import (
    FAST,
    SECRET,
    Fault,
    InProcessGrid,
    NodeConfig,
    events_of,
    files_with,
    metrics_of,
    object_bytes,
    run_federation,
    sites,
    surrogates_of,
)

CONTRACT = {
    "metrics.json",
    "events.jsonl",
    "manifest.json",
    "model.safetensors",
    "surrogates",
    "report.html",
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[InProcessGrid, Path]:
    grid = InProcessGrid(sites(3))
    return grid, run_federation(
        tmp_path_factory.mktemp("compared"), grid, report=True, compare=True
    )


def image_folder(root: Path, rows: range) -> Path:
    """Digits as PNG files, one folder a class: a hospital's own data."""
    digits = load_digits()
    for row in rows:
        file = root / str(digits.target[row]) / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).save(file)
    return root


def own_data(tmp_path: Path, count: int = 2) -> list[NodeConfig]:
    return [
        {
            "site": f"clinic-{index}",
            "data": "imagefolder",
            "data-dir": str(
                image_folder(tmp_path / f"{SECRET}-{index}", range(index * 150, index * 150 + 150))
            ),
        }
        for index in range(count)
    ]


def test_a_run_leaves_every_file_of_the_contract(compared: tuple[InProcessGrid, Path]) -> None:
    _, folder = compared
    assert {path.name for path in folder.iterdir()} >= CONTRACT
    assert re.fullmatch(r"\d{8}T\d{6}Z-fedpft-[0-9a-f]+", folder.name)
    assert set(surrogates_of(folder)) == {"0.pb", "1.pb", "2.pb"}
    assert not list(folder.rglob(".*")), "half-written files"
    page = (folder / "report.html").read_text()
    assert not re.search(r"(src|href)=[\"']?https?:", page)


def test_metrics_keep_their_schema(compared: tuple[InProcessGrid, Path]) -> None:
    metrics = metrics_of(compared[1])
    assert set(metrics) == {
        "schema", "method", "status", "sites", "card", "accuracy", "bytes", "data", "learning", "privacy", "quality",
        "rounds", "seconds", "tested", "versions",
    }  # fmt: skip
    assert metrics["learning"]["solver"] == "lda"
    assert (metrics["schema"], metrics["method"], metrics["status"]) == (1, "fedpft", "ok")
    assert metrics["sites"] == {"invited": 3, "used": 3, "rejected": 0, "dropped": 0}
    assert metrics["privacy"] is None
    accuracy = metrics["accuracy"]
    assert set(accuracy) == {"model", "majority", "centralized", "ensemble", "average", "per_site"}
    assert set(accuracy["per_site"]) == {"0", "1", "2"}
    shares = [value for key, value in accuracy.items() if key != "per_site"] + list(
        accuracy["per_site"].values()
    )
    assert all(type(share) is float and 0 <= share <= 1 for share in shares)
    sent = metrics["bytes"]
    assert set(sent) == {"up", "down", "up_per_site", "compare"}
    assert set(sent["compare"]) == {"centralized", "ensemble", "average"}
    counts = [sent["up"], sent["down"], *sent["up_per_site"].values(), *sent["compare"].values()]
    assert all(type(count) is int and count > 0 for count in counts)
    (only,) = metrics["rounds"]
    assert set(only) == {"round", "accuracy", "bytes_up", "seconds"}
    assert only["bytes_up"] == sent["up"]
    assert (type(only["round"]), only["accuracy"]) == (int, accuracy["model"])
    assert set(metrics["seconds"]) >= {"extract", "fit", "learn", "total"}
    assert all(type(value) is float and value >= 0 for value in metrics["seconds"].values())
    assert (
        sum(v for k, v in metrics["seconds"].items() if k != "total")
        <= metrics["seconds"]["total"] + 0.1
    )


def test_bytes_are_what_travelled(compared: tuple[InProcessGrid, Path]) -> None:
    grid, folder = compared
    sent = metrics_of(folder)["bytes"]
    up, down = zip(*(grid.counted(node) for node in range(3)), strict=True)
    assert [sent["up_per_site"][str(node)] for node in range(3)] == list(up)
    assert (sent["up"], sent["down"]) == (sum(up), sum(down))
    payloads = sum(len(data) for data in surrogates_of(folder).values())
    assert payloads < sent["up"] < object_bytes(grid.received), (
        "headers of records count, Flower's envelopes do not"
    )


def test_the_model_is_within_five_points_of_the_centralized_head(
    compared: tuple[InProcessGrid, Path],
) -> None:
    accuracy = metrics_of(compared[1])["accuracy"]
    assert accuracy["model"] > accuracy["centralized"] - 0.05
    assert accuracy["centralized"] > 0.9


def test_events_are_in_order(compared: tuple[InProcessGrid, Path]) -> None:
    events = events_of(compared[1])
    order = [
        "configured",
        "invited",
        "note",
        *["replied"] * 3,
        "effects",
        "learned",
        *["evaluated"] * 3,
        "compared",
    ]
    assert [event["event"] for event in events] == order
    for event in events:
        if event["event"] == "replied":
            assert {"site", "bytes", "seconds", "counts"} <= set(event)


def test_the_model_file_says_what_it_is(compared: tuple[InProcessGrid, Path]) -> None:
    with safe_open(compared[1] / "model.safetensors", "pt") as file:
        assert file.get_tensor("weight").shape == (10, 64)
        assert file.get_tensor("bias").shape == (10,)
        assert str(file.get_tensor("weight").dtype) == "torch.float32"
        assert json.loads(file.metadata()["classes"]) == [str(digit) for digit in range(10)]
        assert (
            file.metadata()["fingerprint"]
            == json.loads((compared[1] / "manifest.json").read_text())["fingerprint"]
        )


def test_the_same_seed_gives_the_same_bytes_whatever_the_folder(tmp_path: Path) -> None:
    settings = FAST | {"fedpft.covariance": "diag", "fedpft.components": 3}
    first, again, other = (
        run_federation(
            tmp_path / name,
            sites(3),
            seed=seed,
            output_dir=str(tmp_path / f"out-{name}"),
            **settings,
        )
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert surrogates_of(first) == surrogates_of(again)
    heads = [load_file(folder / "model.safetensors") for folder in (first, again)]
    assert all(heads[0][name].equal(heads[1][name]) for name in ("weight", "bias"))
    assert not set(surrogates_of(first).values()) & set(surrogates_of(other).values())


def test_baselines_are_measured_only_when_asked(tmp_path: Path) -> None:
    accuracy = metrics_of(run_federation(tmp_path, sites(2), **FAST))["accuracy"]
    assert set(accuracy) == {"model", "majority", "per_site"}


def test_sites_with_data_of_their_own_are_judged_only_at_home(tmp_path: Path) -> None:
    grid = InProcessGrid(own_data(tmp_path))
    folder = run_federation(tmp_path, grid, compare=True, **FAST)
    metrics = metrics_of(folder)
    assert set(metrics["accuracy"]) == {"per_site"}
    assert set(metrics["accuracy"]["per_site"]) == {"clinic-0", "clinic-1"}
    assert metrics["rounds"][0]["accuracy"] is None
    assert grid.asked("query.compare") == []
    assert not files_with(SECRET, folder), "the sites' folders are theirs alone"


def ask_to_compare(grid: InProcessGrid) -> Message:
    """Send node 0 the same head again, now with a request to compare."""
    head = next(message for message in grid.sent if message.metadata.message_type == "evaluate")
    (reply,) = grid.pull_messages(
        grid.push_messages([Message(head.content, head.metadata.dst_node_id, "query.compare")])
    )
    return reply


def test_a_site_with_its_own_data_refuses_to_compare(tmp_path: Path) -> None:
    grid = InProcessGrid(own_data(tmp_path))
    run_federation(tmp_path, grid, compare=True, **FAST)
    payload, info = from_record(ask_to_compare(grid).content, 2**20)
    assert payload is None
    assert info == {"status": "data", "site": info["site"]}


def test_a_site_that_claims_to_be_simulated_gains_nothing(tmp_path: Path) -> None:
    def claim(record: Any) -> None:
        record.config_records["info"]["simulated"] = True

    grid = InProcessGrid(own_data(tmp_path), {0: Fault(reply=claim)})
    folder = run_federation(tmp_path, grid, compare=True, **FAST)
    assert metrics_of(folder)["status"] == "ok"
    assert set(metrics_of(folder)["accuracy"]) == {"per_site"}
    assert grid.asked("query.compare") == [], "one site's word is not enough"


def test_a_coordinator_cannot_point_a_site_at_a_folder(tmp_path: Path) -> None:
    secret = image_folder(tmp_path / SECRET, range(60))
    grid = InProcessGrid(sites(2))
    with pytest.raises(RunError, match="quorum missed: 0 of 2"):
        run_federation(tmp_path, grid, data="imagefolder", data_dir=str(secret), **FAST)
    assert [from_record(grid.replies(node)[0].content, 2**20)[1]["status"] for node in (0, 1)] == [
        "data",
        "data",
    ]
    assert not list((tmp_path / "site-cache").rglob("*.npy")), "the folder was read"


def test_the_run_cannot_move_a_site_from_its_own_data(tmp_path: Path) -> None:
    folders = own_data(tmp_path)
    other = image_folder(tmp_path / "elsewhere", range(400, 420))
    folder = run_federation(
        tmp_path, folders, data="imagefolder", data_dir=str(other), dataset="../elsewhere", **FAST
    )
    counts = [event["counts"] for event in events_of(folder) if event["event"] == "replied"]
    assert [sum(count.values()) for count in counts] == [120, 120]


def test_no_site_at_all_ends_the_run_with_a_complete_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no site is connected"):
        run_federation(tmp_path, [], report=True, deadline=0.1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert metrics_of(folder)["status"] == "failed"
    assert {path.name for path in folder.iterdir()} >= CONTRACT - {"model.safetensors"}
    assert events_of(folder)[-1]["event"] == "failed"


def test_sites_may_send_less_than_the_run_asks_for(tmp_path: Path) -> None:
    nodes = sites(3)
    nodes[1] |= {"max-rank": 4}
    nodes[2] |= {"max-components": 1, "max-rank": 2}
    folder = run_federation(
        tmp_path, nodes, partition="iid", **FAST, **{"fedpft.components": 3, "fedpft.rank": 8}
    )
    assert metrics_of(folder)["sites"]["used"] == 3
    tables = [
        pb.Surrogate.FromString(data).mixtures for _, data in sorted(surrogates_of(folder).items())
    ]
    assert [table.spread[1].shape[1] for table in tables] == [8, 4, 2]
    assert [max(table.components) for table in tables] == [3, 3, 1]
    assert metrics_of(folder)["accuracy"]["model"] > 0.7
