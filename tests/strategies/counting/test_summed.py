"""Counts through secure aggregation: exact or with one distributed noise, and nothing of a single hospital
anywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsurrogate.client_app.secure_aggregation as masked
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.privacy.accounting import gaussian_epsilon, gaussian_noise_multiplier
from fedsurrogate.common.privacy.gaussian_mechanism import CONTINUOUS
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import site_variances
from fedsurrogate.common.secure_aggregation.rules import numbers_of, rules_of, shapes_of
from fedsurrogate.common.secure_aggregation.secrets import words
from fedsurrogate.server_app.counting import (
    counting_budget,
    evaluation_settings,
    survey_settings,
)
from tests.client_app.model_use.hospitals import CLASSES, rows_of_classes, write_images
from tests.grid import InProcessGrid, NodeConfig, events_of, metrics_of, open_new, run_federation
from tests.strategies.counting.hospitals import (
    NUMBERS,
    allow,
    entries,
    evaluated,
    learned,
    renewed,
    surveyed,
)
from tests.strategies.interrupted import wire_of
from tests.totals import unpack_total

Hospitals = tuple[list[NodeConfig], Path]
SUMMED: dict[str, Any] = {"secure-aggregation": True}
NOISY = 'mechanisms = ["secure-aggregation"]\n'
EXACT = 'exact-counts = ["evaluation", "survey"]\nsmallest-cell = 1\n'
RUN = {"counting.digest": "0" * 64, "classes": "a,b,c,d"} | SUMMED


@pytest.fixture(scope="module")
def learned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NodeConfig], Path]:
    home = tmp_path_factory.mktemp("summed")
    return home, *learned(home)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def hospitals(learned_once: tuple[Path, list[NodeConfig], Path], home: Path) -> Hospitals:
    """Three hospitals with fresh ledgers, which allow counts by secure aggregation only with distributed noise;
    and a run's folder.
    """
    _, nodes, run = learned_once
    return renewed(home, nodes, NOISY), run


def permit(home: Path, text: str, count: int = 3) -> None:
    for number in range(count):
        allow(home, number, text)


def test_the_sum_of_exact_counts_is_that_of_the_single_ones(
    home: Path, hospitals: Hospitals
) -> None:
    nodes, run = hospitals
    permit(home, EXACT)
    plain, summed = (
        evaluated(home, nodes, run, epsilon=0.0, **settings)[1] for settings in ({}, SUMMED)
    )
    assert summed.pop("secure_aggregation") is True
    assert plain.pop("per_site") == {}
    assert summed == plain
    assert {entry["mechanism"] for node in nodes for entry in entries(node)} == {"exact-counts"}


@pytest.mark.parametrize("epsilon", [0.0, 4.0], ids=["exact", "private"])
def test_neither_a_message_nor_a_file_of_the_coordinator_shows_one_hospitals_counts(
    home: Path, hospitals: Hospitals, vectors: dict[str, np.ndarray], epsilon: float
) -> None:
    nodes, run = hospitals
    permit(home, NOISY if epsilon else EXACT + "show-evaluation = true\n")
    settings, _ = evaluation_settings(run, counting_budget(epsilon, 1e-5, secure_aggregation=True))
    grid = InProcessGrid(nodes, run_id=next(NUMBERS))
    folder = run_federation(home, grid, report=True, **settings)
    total = unpack_total((folder / "sum.pb").read_bytes())[2]
    assert len(vectors) == 3
    assert (total == words(sum(vectors.values()))).all()
    wire = wire_of(grid)
    said = "".join(str(dict(r)) for m in grid.received for r in m.content.config_records.values())
    files = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    for vector in vectors.values():
        # The decisions of this hospital, and what the two others have together: as numbers, as
        # counts and as text.
        for numbers in (words(vector), total - words(vector)):
            decisions = numbers[:9]
            for form in (decisions.astype("<u4").tobytes(), decisions.astype("<f8").tobytes()):
                assert form not in wire
                assert form not in files
            rows = [str(row)[1:-1] for row in decisions.reshape(3, 3).tolist()]
            assert not any(row in said for row in rows)
            assert f"[{', '.join(f'[{row}]' for row in rows)}]" not in json.dumps(
                json.loads((folder / "evaluation.json").read_text())
            )
    assert not list((folder / "surrogates").iterdir())
    assert "per_site" not in json.loads((folder / "evaluation.json").read_text())
    assert all("counts" not in event and "records" not in event for event in events_of(folder))
    assert "secure aggregation" in (folder / "report.html").read_text()


def test_one_distributed_noise_is_charged_at_each_hospital_and_is_in_the_intervals(
    home: Path, hospitals: Hospitals
) -> None:
    nodes, run = hospitals
    permit(home, EXACT)
    exact = evaluated(home, nodes, run, epsilon=0.0)[1]["accuracy"]["value"]
    permit(home, NOISY)
    folder, result = evaluated(home, nodes, run, epsilon=4.0, colluding=1 / 3, **SUMMED)
    low, high = result["accuracy"]["low"], result["accuracy"]["high"]
    # The interval with five times its width: this one draw must not fail by chance.
    assert low - 2 * (high - low) <= exact <= high + 2 * (high - low)
    multiplier = gaussian_noise_multiplier(4.0, 1e-5)
    for node in nodes:
        entry = entries(node)[-1]
        assert (entry["method"], entry["mechanism"], entry["epsilon"]) == (
            "evaluation",
            "secure-aggregation",
            4.0,
        )
        assert [event["noise_multiplier"] for event in entry["events"]] == [
            pytest.approx(multiplier)
        ]
        assert entry["sensitivities"] == {"decisions": 1.0, "scores": pytest.approx(3**0.5)}
        assert entry["facts"]["local-epsilon"] > 4.0
    # Two of three sites give the whole noise, so that of three has 3/2 of its variance.
    whole = multiplier * (1 + 3**0.5) ** 0.5
    assert result["noise"]["decisions"] == pytest.approx(whole * 1.5**0.5, rel=1e-3)
    card = metrics_of(folder)["privacy"]
    assert (card["mechanism"], card["epsilon"]) == ("secure-aggregation", 4.0)
    assert "decisions and scores" in card["covers"]
    assert metrics_of(folder)["learning"]["secure-aggregation-of"] == 3


def test_a_survey_training_and_evaluations_of_the_same_hospitals_are_all_exact_sums(
    tmp_path: Path,
) -> None:
    """With a split that the run draws, a survey counts the records that train: the others would be
    the difference.
    """
    nodes = four_hospitals(tmp_path)
    asked = survey_settings(CLASSES, counting_budget(0.0, 0.0, secure_aggregation=True)) | {
        "image-size": 8
    }
    survey = run_federation(tmp_path, nodes, **asked)
    training = {"fedpft.covariance": "gram", "classes": ",".join(CLASSES), "image-size": 8} | SUMMED
    run = run_federation(tmp_path, nodes, **training)
    counts = unpack_total((run / "sum.pb").read_bytes())[2][:3].tolist()
    surveyed_records = json.loads((survey / "survey.json").read_text())["classes"]
    assert [row["value"] for row in surveyed_records.values()] == counts
    for _ in range(2):
        asked, _ = evaluation_settings(run, counting_budget(0.0, 0.0, secure_aggregation=True))
        result = json.loads(
            (run_federation(tmp_path, nodes, **asked) / "evaluation.json").read_text()
        )
        assert result["records"]["value"] == 4 * 30


def test_a_difference_of_evaluations_shows_neither_a_hospital_nor_a_held_out_record(
    tmp_path: Path,
) -> None:
    nodes = four_hospitals(tmp_path)
    training = {"fedpft.covariance": "gram", "classes": ",".join(CLASSES), "image-size": 8} | SUMMED
    run = run_federation(tmp_path, nodes, **training)
    asked, _ = evaluation_settings(run, counting_budget(0.0, 0.0, secure_aggregation=True))
    with pytest.raises(RunError, match="nothing was revealed"):
        run_federation(tmp_path, nodes[:3], **asked)
    assert "with other sites" in log_of(nodes[0])
    run_federation(tmp_path, nodes, **asked)
    image = next(Path(str(nodes[3]["held-out-dir"])).rglob("*.png"))
    image.unlink()
    with pytest.raises(RunError, match="a site has withheld the secure aggregation"):
        run_federation(tmp_path, nodes, **asked | {"dropouts": 0.0})
    assert "data have changed" in log_of(nodes[3])


def test_a_hospital_with_small_classes_adds_zeros_and_does_not_show_it(
    home: Path, hospitals: Hospitals, vectors: dict[str, np.ndarray]
) -> None:
    nodes, _ = hospitals
    permit(home, EXACT)
    allow(home, 1, EXACT.replace("smallest-cell = 1", "smallest-cell = 500"))
    _, result = surveyed(home, nodes, epsilon=0.0, **SUMMED)
    assert not vectors["clinic-1"].any()
    others = vectors["clinic-0"] + vectors["clinic-2"]
    assert [row["value"] for row in result["classes"].values()] == others[:-1].tolist()
    assert (result["sites"], (others[:-1] > 0).all(), others[-1]) == (3, True, 0)


@pytest.mark.parametrize("place", [0, 20])
def test_counts_that_no_records_give_end_the_run(
    home: Path, hospitals: Hospitals, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    nodes, run = hospitals
    real = masked.protocol.mask

    def false(state: Any, delivered: Any, rules: Any, values: Any) -> Any:
        if state.site == "clinic-1":
            values = values.copy()
            values[place] += (1 if place else -1) * 2**28
        return real(state, delivered, rules, values)

    monkeypatch.setattr(masked.protocol, "mask", false)
    with pytest.raises(RunError, match="some site has added false numbers"):
        evaluated(home, nodes, run, **SUMMED)


def test_a_hospital_that_allows_only_its_own_noise_takes_no_part(
    home: Path, hospitals: Hospitals
) -> None:
    nodes, run = hospitals
    permit(home, 'mechanisms = ["counts"]\n')
    with pytest.raises(RunError, match="quorum"):
        evaluated(home, nodes, run, **SUMMED)
    assert all(entries(node) == [] for node in nodes)


def test_a_hospital_that_requires_secure_aggregation_now_takes_part(tmp_path: Path) -> None:
    nodes = four_hospitals(tmp_path, "require-secure-aggregation = true\n")
    run = run_federation(
        tmp_path,
        nodes,
        **{"fedpft.covariance": "gram", "classes": ",".join(CLASSES), "image-size": 8},
        **SUMMED,
    )
    for secure_aggregation in (True, False):
        asked, _ = evaluation_settings(run, counting_budget(0.0, 0.0, secure_aggregation))
        if secure_aggregation:
            assert (run_federation(tmp_path, nodes, **asked) / "evaluation.json").is_file()
            continue
        with pytest.raises(RunError, match="policy"):
            run_federation(tmp_path, nodes, **asked)


@pytest.mark.parametrize("kind", ["evaluation", "survey"])
@pytest.mark.parametrize(
    "fault", ["", "one record is in one cell only", "all sites count as honest"]
)
def test_counts_with_distributed_noise_cost_no_more_than_the_claim(kind: str, fault: str) -> None:
    """All tables move by their whole sensitivity at once, and only the honest sites' noise counts."""
    run = parse_run(RUN | {"counting.kind": kind, "epsilon": 1.0, "delta": 1e-5})
    claim, rules = run.mechanism, rules_of(run.settings, 10)
    assert claim is not None
    numbers, shapes = (
        numbers_of(run.plan, run.settings, 10),
        shapes_of(run.plan, len(run.settings.classes), 1),
    )
    given = claim
    if fault.startswith("one"):
        given = replace(
            claim,
            noise={name: (sigma / bound, 1.0) for name, (sigma, bound) in claim.noise.items()},
        )
    variances = site_variances(
        given, numbers, shapes, replace(rules, colluding=0) if fault.startswith("all") else rules
    )
    spent = 0.0
    for name, shape in shapes.items():
        moved = claim.noise[name][1] / numbers[name].step + torch.tensor(shape).prod().sqrt().item()
        spent += moved**2 / (rules.honest * variances[name] - CONTINUOUS)
    too_much = gaussian_epsilon(spent**-0.5, 1e-5) > run.settings.epsilon * 1.0001
    assert too_much == (bool(fault) and not (fault.startswith("one") and kind == "survey"))
    if not fault:
        assert gaussian_epsilon(spent**-0.5, 1e-5) > run.settings.epsilon * 0.99


def four_hospitals(home: Path, policy: str = "") -> list[NodeConfig]:
    """Hospitals without a split in their files, with 30 held-out images each, which know each
    other's keys.
    """
    from fedsurrogate.client_app.node_config import parse_node_config
    from fedsurrogate.client_app.offline.keys import private_key
    from fedsurrogate.common.security.sealing import public_key

    rows = rows_of_classes()
    nodes: list[NodeConfig] = []
    for k in range(4):
        text = f"without-dp = true\nsmallest-class = 1\nsmallest-cell = 1\n{policy}"
        text += "exact-sums-at-models = true\n"
        (home / f"policy-{k}.toml").write_text(text)
        node: NodeConfig = {
            "site": f"clinic-{k}",
            "data": "imagefolder",
            "data-dir": str(write_images(home / f"images-{k}", rows[k:160:4])),
            "held-out-dir": str(
                write_images(home / f"held-{k}", rows[160 + 30 * k : 190 + 30 * k])
            ),
            "policy": str(home / f"policy-{k}.toml"),
            "peers": str(home / "peers.toml"),
        }
        node |= {
            f"{name}-dir": str(home / f"{name}-{k}") for name in ("state", "cache", "check-log")
        }
        open_new(node)
        nodes.append(node)
    lasting = {
        node["site"]: public_key(private_key(parse_node_config(node), str(node["site"]))).hex()
        for node in nodes
    }
    (home / "peers.toml").write_text(
        "".join(f'{site} = "{key}"\n' for site, key in lasting.items())
    )
    return nodes


def log_of(node: NodeConfig) -> str:
    return (Path(str(node["state-dir"])) / "site.log").read_text()
