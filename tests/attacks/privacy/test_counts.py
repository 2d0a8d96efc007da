"""Counts of an evaluation or a survey: sensitivity, requests past the gate, models made to leak,
and lying hospitals.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from PIL import Image
from torch import Tensor

from fedsurrogate.common.backbones.backbones import load_backbone
from fedsurrogate.common.errors import ConfigError, RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Ensemble, Head, scores_alone
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import save_model
from fedsurrogate.common.wire.records import INFO, to_record
from fedsurrogate.common.wire.surrogate_proto import Counts, pack_counts, unpack_counts
from fedsurrogate.strategies.counting.strategy import payload_of, read_model
from tests.client_app.model_use.hospitals import CLASSES
from tests.grid import FIRST_NODE, Fault, InProcessGrid, NodeConfig, default_run_config, events_of
from tests.strategies.counting.hospitals import POLICY, allow, entries, evaluated, learned


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NodeConfig], Path]:
    home = tmp_path_factory.mktemp("counts")
    return home, *learned(home)


def test_the_score_of_a_record_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    header = Header("", "", "", "f", CLASSES)
    head = Head(header, 9e3 * torch.randn(3, 512, generator=generator), torch.zeros(3))
    x = torch.randn(40, 512, generator=generator)
    every = scores_alone(head, x)
    assert all(torch.equal(scores_alone(head, x[k : k + 1]), every[k : k + 1]) for k in range(40))
    assert any(torch.equal(scores_alone(head, x[k:]), every[k:]) for k in range(40))


def ask(node: NodeConfig, kind: str, **more: Any) -> str:
    """The status of a site's reply to one message of a run that counts."""
    grid = InProcessGrid([node], run_id=4711)
    own = {"device": "cpu", "image-size": 8, "classes": ",".join(CLASSES)} | more
    grid.run_config = run = default_run_config() | own
    content = to_record(None, {"run": parse_run(run).digest})
    (reply,) = grid.pull_messages(grid.push_messages([Message(content, FIRST_NODE, kind)]))
    return str(reply.content.config_records[INFO]["status"])


@pytest.mark.parametrize("kind", ["query.hello", "query.head", "query.compare", "evaluate"])
def test_allowing_exact_counts_opens_no_other_request(
    hospitals: tuple[Path, list[NodeConfig], Path], kind: str
) -> None:
    """Exact counts need runs without epsilon; other requests of such a run would see records
    without any charge.
    """
    home, nodes, _ = hospitals
    allow(home, 0, 'exact-counts = ["survey", "evaluation"]\n')
    exact = {"counting.kind": "survey"}
    assert ask(nodes[0], kind, **exact) == "policy"
    if kind != "query.hello":
        assert ask(nodes[0], kind, **exact, **{"secure-aggregation": True}) == "policy"
    assert ask(nodes[0], "train", **exact) == "ok", "the survey itself is answered"
    assert ask(nodes[0], "train", method="average") == "policy", "and nothing else without privacy"
    assert {entry["mechanism"] for entry in entries(nodes[0])} == {"sums", "exact-counts"}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('methods = ["fedpft"]\n', "a policy that lists its methods"),
        ("require-secure-aggregation = true\n", "a site whose part must never be seen alone"),
        ('mechanisms = ["sums"]\n', "a policy that lists its mechanisms"),
        ("epsilon-per-run = 0.5\n", "a smaller budget"),
    ],
)
def test_the_policy_holds_for_counts_as_for_any_release(
    hospitals: tuple[Path, list[NodeConfig], Path], text: str, refused: str
) -> None:
    home, nodes, run = hospitals
    kept = POLICY.replace("epsilon-per-run = 8.0\n", "") if "per-run" in text else POLICY
    (home / "policy-0.toml").write_text(kept + text)
    before = len(entries(nodes[0]))
    folder, result = evaluated(home, nodes, run, epsilon=1.0)
    assert result["sites"] == 2, refused
    assert rejected(folder) == ["clinic-0"]
    assert len(entries(nodes[0])) == before
    allow(home, 0, "")


def test_evaluations_end_with_the_budget(hospitals: tuple[Path, list[NodeConfig], Path]) -> None:
    home, nodes, run = hospitals
    (home / "policy-1.toml").write_text("epsilon-per-run = 8.0\nepsilon-total = 12.0\n")
    before, refused = len(entries(nodes[1])), list[str]()
    while not refused and len(entries(nodes[1])) < before + 9:
        folder, _ = evaluated(home, nodes, run, epsilon=4.0)
        refused = rejected(folder)
    assert refused == ["clinic-1"]
    assert len(entries(nodes[1])) > before
    allow(home, 1, "")


def named(file: Path) -> dict[str, str]:
    """The settings that name a model."""
    return {"counting.model": str(file), "counting.digest": payload_of(read_model(file))[1]}


def test_a_model_with_huge_weights_is_refused_in_a_private_evaluation(
    hospitals: tuple[Path, list[NodeConfig], Path], tmp_path: Path
) -> None:
    home, nodes, run = hospitals
    honest = read_model(run / "model.safetensors")
    assert isinstance(honest, Head)
    file = tmp_path / "huge.safetensors"
    # As an ensemble: the coordinator's own program would scale a head down, which a hostile one
    # does not.
    save_model(
        Ensemble((Head(honest.header, honest.weight * 1e6, honest.bias, honest.clip),)), file
    )
    before = len(entries(nodes[2]))
    with pytest.raises(RunError, match="quorum"):
        evaluated(home, nodes, run, **named(file))
    assert len(entries(nodes[2])) == before


def heads_of(run: Path, image: Path) -> tuple[Head, Head]:
    """The two models of a coordinator that has the image of a person. The first decides always for
    "1". The second decides for "7" where features have a cosine above 0.9985 to those of the image.
    So their decisions differ for that record alone.
    """
    honest, backbone = read_model(run / "model.safetensors"), load_backbone("pixels", "", 8, "cpu")
    with Image.open(image) as opened:
        features = backbone.forward(backbone.preprocess(opened.convert("RGB"))[None])[0].float()
    direction = features / features.norm()
    constant = Head(
        honest.header, torch.zeros(3, len(direction)), torch.tensor([0.0, -1e3, -1e3]), clip=0.0
    )
    near = torch.stack([0 * direction, 0 * direction, 1000 * direction])
    return constant, Head(honest.header, near, torch.tensor([0.0, -1e3, -998.5]), clip=0.0)


def judged(home: Path, node: NodeConfig, run: Path, head: Head, epsilon: float) -> dict[str, Any]:
    """The result of an evaluation of a head at one hospital."""
    payload, digest = payload_of(head)
    (home / "head.pb").write_bytes(payload)
    more = {
        "counting.model": str(home / "head.pb"),
        "counting.digest": digest,
        "features.power-transform": 1.0,
    }
    return evaluated(home, [node], run, epsilon=epsilon, **more)[1]


def test_exact_counts_show_one_record_to_a_coordinator_that_chooses_the_models(
    hospitals: tuple[Path, list[NodeConfig], Path], tmp_path: Path
) -> None:
    """What `exact-counts` gives away, as the documentation says. No floor for counts prevents it;
    noise does.
    """
    home, nodes, run = hospitals
    allow(home, 0, 'exact-counts = ["evaluation"]\n')
    image = sorted((Path(str(nodes[0]["held-out-dir"])) / "7").iterdir())[3]
    without = tmp_path / "held"
    shutil.copytree(str(nodes[0]["held-out-dir"]), without)
    (without / "7" / image.name).unlink()
    constant, chosen = heads_of(run, image)
    for folder, present in ((nodes[0]["held-out-dir"], 1), (without, 0)):
        node = nodes[0] | {"held-out-dir": str(folder)}
        first, second = (judged(home, node, run, head, 0.0) for head in (constant, chosen))
        apart = torch.tensor(second["decisions"]) - torch.tensor(first["decisions"])
        assert apart.tolist() == [[0, 0, 0], [0, 0, 0], [-present, 0, present]]
        # One model is enough: the class has ten records or more, one cell of its decisions has one.
        assert second["decisions"][2][2] == present
        assert sum(second["decisions"][2]) >= 10
        # The noise has at least five times the deviation of what it must hide.
        assert judged(home, node, run, chosen, 1.0)["noise"]["decisions"] > 5


def lying(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Fault:
    """A site that sends other tables."""

    def lie(payload: bytes) -> bytes:
        counts = unpack_counts(payload)
        tables = {name: table.clone() for name, table in counts.tables.items()}
        return pack_counts(Counts(counts.header, change(tables), counts.claim))

    return Fault(payload=lie)


def rejected(folder: Path) -> list[str]:
    return [event["site"] for event in events_of(folder) if event["event"] == "rejected"]


LIES = {
    "negative": lambda tables: tables | {"decisions": tables["decisions"] - 10_000},
    "not the same records": lambda tables: tables | {"decisions": tables["decisions"] + 10_000},
    "huge": lambda tables: {name: table + 2_000_000_000 for name, table in tables.items()},
    "a table less": lambda tables: {"decisions": tables["decisions"]},
    "another shape": lambda tables: tables | {"scores": tables["scores"][:, :, :4]},
}


@pytest.mark.parametrize("name", LIES)
def test_counts_that_no_records_give_are_refused_and_the_others_used(
    hospitals: tuple[Path, list[NodeConfig], Path], name: str
) -> None:
    home, nodes, run = hospitals
    faults = {1: lying(LIES[name])}
    folder, result = evaluated(home, nodes, run, epsilon=1.0, faults=faults)
    assert result["sites"] == 2
    assert rejected(folder) == ["clinic-1"]


def test_a_run_that_counts_without_classes_or_a_model_does_not_start() -> None:
    with pytest.raises(ConfigError, match="needs classes"):
        parse_run({"counting.kind": "survey"})
    with pytest.raises(ConfigError, match=r"counting\.digest"):
        parse_run({"counting.kind": "evaluation", "classes": "a,b"})


def test_a_broken_message_is_refused() -> None:
    header = Header("fedpft", "r", "s", "f", ("a", "b"))
    payload = pack_counts(Counts(header, {"records": torch.tensor([3, 4])}))
    assert unpack_counts(payload).tables["records"].tolist() == [3, 4]
    for broken in (payload[:-1], payload + b"\x01", payload.replace(b"records", b"recor")):
        with pytest.raises(SurrogateError):
            unpack_counts(broken)
