"""A coordinator cannot make a site compute for hours, fill its disk or use gigabytes; it refuses
before it works.
"""

import itertools
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.site_data import clipped
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.budget import Release
from fedsurrogate.client_app.governance.gate import Gate, open_ledger
from fedsurrogate.client_app.governance.policy import (
    DEFAULT,
    PUBLIC_DATA,
    confirm_policy,
    load_policy,
    policy_of,
)
from fedsurrogate.client_app.governance.work_limits import REQUESTS_FILE, check_size, check_work
from fedsurrogate.client_app.methods.fedpft.surrogate import dp_em
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.requests import answer
from fedsurrogate.common.errors import (
    BudgetError,
    ConfigError,
    DataError,
    FedSurrogateError,
    PolicyError,
    SurrogateError,
)
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.mixtures import Frame
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.common.wire.records import to_record

RECORDS = "fedsurrogate.client_app.governance.release.with_records"
PRIVATE: dict[str, Any] = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "classes": "a,b",
    "backbone": "pixels",
    "image-size": 8,
}


def named(count: int) -> str:
    """So many classes."""
    return ",".join(map(str, range(count)))


@pytest.fixture
def hospital(tmp_path: Path) -> NodeConfig:
    """A site with images of three classes and the default policy."""
    random = np.random.default_rng(0)
    for name in "abc":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(
                tmp_path / f"images/{name}/{number}.png"
            )
    node = NodeConfig(
        site="s",
        data="imagefolder",
        data_dir=str(tmp_path / "images"),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
        check_log_dir=str(tmp_path / "check-log"),
    )
    open_ledger(node)
    return node


def with_policy(node: NodeConfig, text: str, limits: str = "") -> NodeConfig:
    """A policy that a person has confirmed, and limits of work."""
    file = node.state.parent / "policy.toml"
    file.write_text(text)
    file.with_name("limits.toml").write_text(limits)
    own = node.model_copy(update={"policy": str(file)})
    confirm_policy(own, load_policy(own.policy))
    return own


def asked(
    node: NodeConfig, work: str, run: dict[str, Any], flower_run: str = "1", **info: Any
) -> None:
    """A message of a run with these settings, as the app passes it to the site."""
    content = to_record(None, {"run": parse_run(run).digest} | info)
    answer(work, content, run, flower_run, node, node.site)


def hello(node: NodeConfig, flower_run: str = "1", **settings: Any) -> None:
    """The first message of a run."""
    asked(node, "identification", PRIVATE | settings, flower_run)


def release(node: NodeConfig, flower_run: str, **settings: Any) -> None:
    """A whole run: its one message that needs features."""
    run = PRIVATE | {"epsilon": 0.01, "fedpft.covariance": "spherical"} | settings
    asked(node, "surrogate", run, flower_run)


def entries(node: NodeConfig) -> set[str]:
    """Cached features of whole data sets, by name."""
    return {folder.name for folder in (node.cache / "features").iterdir() if folder.is_dir()}


def test_invented_class_names_neither_compute_nor_store_features_again(
    hospital: NodeConfig,
) -> None:
    for run, classes in enumerate(
        ("a,b", "a,c", "c,b,a", *(f"a,invented-{number}" for number in range(5)))
    ):
        release(hospital, str(run), classes=classes)
    assert len(entries(hospital)) == 1


def test_features_of_some_classes_are_those_of_the_same_records(hospital: NodeConfig) -> None:
    most = policy_of(hospital).cache_mib
    every, some = (
        load_site(parse_run(PRIVATE | {"classes": classes}), hospital, most)
        for classes in ("a,b,c", "c,a")
    )
    for position, name in enumerate(("c", "a")):
        wanted = every.train.features[every.train.labels == "abc".index(name)]
        found = some.train.features[some.train.labels == position]
        assert len(found) == 4
        assert (found == wanted).all()


def test_a_million_class_names_are_refused_before_they_are_split(hospital: NodeConfig) -> None:
    with pytest.raises(ConfigError, match="at most 10000 names") as error:
        hello(hospital, classes=named(1_000_000))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"classes": named(1001)}, "most-classes = 1000"),
        ({"classes": "a," + "b" * 201}, "longest-class-name = 200"),
        ({"backbone": "torchvision:mobilenet_v2", "image-size": 4096}, "largest-image-size = 1024"),
        ({"image-size": 91}, "largest-dimension = 8192"),
        ({"method": "dp-fedavg", "fedavg.rounds": 100_000}, "most-rounds = 1000"),
        ({"method": "dp-fedavg", "fedavg.local-epochs": 10_000}, "most-steps = 20000"),
        ({"method": "dp-fedavg", "fedavg.sample-rate": 1e-6}, "most-steps = 20000"),
        (
            {"method": "dp-fedavg", "fedavg.sample-rate": 1.0, "fedavg.local-epochs": 1001},
            "most-passes = 1000",
        ),
        ({"method": "dpcvae", "dpcvae.local-epochs": 10_000}, "most-passes = 1000"),
        ({"method": "dpcvae", "dpcvae.hidden": 8192}, "largest-width = 2048"),
        ({"method": "dpcvae", "dpcvae.latent": 4096}, "largest-width = 2048"),
        ({"method": "dpcvae", "dpcvae.synthetic": 100_000, "classes": named(11)}, "most-synthetic"),
        ({"method": "dpcvae", "head.min-steps": 10**9}, "most-steps = 20000"),
        ({"method": "fedlap", "fedlap.image-steps": 100_000}, "most-steps = 20000"),
        (
            {"method": "fedlap", "fedlap.trajectories": 1000, "fedlap.loops": 1000},
            "most-steps = 20000",
        ),
        (
            {"method": "fedlap", "fedlap.images-per-class": 10_000, "classes": named(101)},
            "most-synthetic",
        ),
        ({"fedpft.components": 1000}, "most-components = 100"),
        ({"fedpft.rank": 4096}, "largest-rank = 512"),
        (
            {"method": "local", "epsilon": 0.0, "delta": 0.0, "head.epochs": 10_000},
            "most-passes = 1000",
        ),
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["data", "no data"])
def test_work_without_end_is_refused_before_the_data_are_looked_at(
    hospital: NodeConfig, settings: dict[str, Any], key: str, there: bool
) -> None:
    node = with_policy(hospital, "without-dp = true")
    node = node if there else node.model_copy(update={"data_dir": "/nowhere"})
    for work in ("identification", "surrogate", "evaluation", "head", "comparison"):
        with pytest.raises(PolicyError) as error:
            answer(work, to_record(None, {}), PRIVATE | settings, "1", node, "s")
        assert key in str(error.value)
    assert not (node.cache / "features").exists()
    # The line that opened it.
    assert all(
        len(file.read_text().splitlines()) == 1 for file in (node.state / "ledgers").glob("*.jsonl")
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": "dp-fedavg"},
        {"method": "fedlap"},
        {"method": "dpcvae"},
        {"method": "dpcvae", "dpcvae.sample-rate": 1 / 7, "dpcvae.local-epochs": 250},
        {"method": "fedpft", "fedpft.components": 10, "fedpft.covariance": "spherical"},
        {
            "backbone": "torchvision:resnet50",
            "image-size": 224,
            "classes": named(100),
        },
    ],
)
def test_ordinary_runs_are_within_the_default_limits(settings: dict[str, Any]) -> None:
    run = parse_run(PRIVATE | settings)
    classes = len(run.settings.classes)
    check_work(run.plan.work(classes, 0), DEFAULT, run.settings)
    check_size(run.plan.work(classes, 1280), DEFAULT, 1280, classes)


def test_requests_are_counted_on_the_disk_for_a_run_and_for_an_hour(hospital: NodeConfig) -> None:
    node = with_policy(hospital, "", "requests-per-run = 3\nrequests-per-hour = 5")
    for _ in range(3):
        hello(node)
    with pytest.raises(PolicyError, match="requests-per-run = 3"):
        hello(node)
    hello(node, "2")
    hello(node, "3")
    with pytest.raises(PolicyError, match="requests-per-hour = 5"):
        hello(node, "4")


def test_the_least_recently_used_features_go_when_the_cache_is_full(hospital: NodeConfig) -> None:
    runs = itertools.count(1)

    def compute(size: int, mib: float = 0.0125) -> str:
        before = entries(hospital) if (hospital.cache / "features").exists() else set()
        policy = with_policy(hospital, "", f"cache-mib = {mib}\nextractions-per-day = 99")
        release(policy, str(next(runs)), **{"image-size": size})
        (new,) = (entries(hospital) - before) or {""}
        return new

    # About 3.5 KiB each: three fit.
    first, second, third = compute(10), compute(11), compute(12)
    for age, name in ((300, first), (200, second), (100, third)):
        os.utime(hospital.cache / "features" / name, (time.time() - age, time.time() - age))
    assert compute(10) == ""
    fourth = compute(13)
    assert entries(hospital) == {first, third, fourth}
    # An entry in use by another process stays; so does the newest entry, at any size.
    with FileLock(hospital.cache / "features" / f"{first}.lock"):
        fifth = compute(32, 0.001)
        assert entries(hospital) == {first, fifth}
    assert compute(32, 0.001) == ""
    assert entries(hospital) == {fifth}


@pytest.mark.parametrize("method", ["fedpft", "dp-fedavg", "dpcvae"])
def test_a_release_that_the_budget_cannot_pay_for_costs_no_work(
    hospital: NodeConfig, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = with_policy(hospital, "epsilon-total = 1.0\nepsilon-per-run = 1.0\nmechanisms = ['*']")
    worked: list[str] = []

    def works(run: Run, *_: object) -> None:
        worked.append(run.settings.method)
        raise DataError("not in this test")

    run, first = PRIVATE | {"method": method}, {"round": 1, "lineage": "a"}
    with monkeypatch.context() as patch:
        patch.setattr(RECORDS, works)
        with pytest.raises(DataError):
            asked(node, "surrogate", run, **first)
    assert worked == [method], "what can be paid for is worked on"
    release(node, "2", epsilon=1.0)
    monkeypatch.setattr(RECORDS, works)
    with pytest.raises(BudgetError, match="epsilon-total = 1"):
        asked(node, "surrogate", run, "3", **first)
    assert worked == [method]


@pytest.mark.parametrize(
    "settings",
    [{}, {"method": "dp-fedavg"}, {"fedpft.components": 2}, {"fedpft.topology": "chain"}],
)
def test_what_is_planned_is_what_is_charged(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.attacks.privacy import visits
    from tests.attacks.privacy.neighbours import Record

    plans: list[Release] = []
    checked = Gate.check_planned
    monkeypatch.setattr(
        Gate, "check_planned", lambda self, plan: plans.append(plan) or checked(self, plan)
    )
    small = {
        "head.min-steps": 2,
        "head.epochs": 1,
        "fedpft.covariance": "spherical",
        **visits.ROUNDS,
    }
    hospital = visits.Hospital(tmp_path, "folder", (Record("a"), Record("b", "2")))
    hospital.visit(small | settings)
    visits.close_logs()
    charged = hospital.entries()
    assert charged
    same = ["run", "flower_run", "method", "round", "mechanism", "unit", "epsilon", "delta"]
    same += ["sigmas", "sample_rate", "events"]
    for entry in charged:
        names = entry["flower_run"], entry["run"]
        # Of the identification and of the request itself.
        own = [each for each in plans if (each.flower_run, each.run) == names]
        assert own
        for plan in own:
            planned = json.loads(json.dumps(asdict(plan)))
            assert [planned[key] for key in same] == [entry[key] for key in same]


@pytest.mark.parametrize("work", ["name", "identification", "head"])
def test_a_large_message_is_refused_before_anything_else_is_done(
    hospital: NodeConfig, work: str
) -> None:
    content = to_record(bytes(10_000), {"bytes": 10_000})
    with pytest.raises(SurrogateError, match="10000 bytes; at most 0"):
        answer(work, content, PRIVATE, "1", hospital, "s")
    assert not (hospital.state / REQUESTS_FILE).exists()


def test_a_request_is_counted_before_its_receipts_are_read(hospital: NodeConfig) -> None:
    node = with_policy(hospital, "", "requests-per-run = 2")
    for message in ("receipt", "receipt", "requests-per-run = 2"):
        with pytest.raises(FedSurrogateError, match=message):
            asked(node, "identification", PRIVATE, receipts="unreadable")


def test_dp_em_holds_no_table_of_records_and_components_of_all_classes() -> None:
    count, classes, components = 400, 200, 20
    run = parse_run(PRIVATE | {"fedpft.components": components, "fedpft.covariance": "spherical"})
    claim = run.mechanism
    assert claim is not None
    labels = torch.arange(count) % classes
    data = clipped(torch.randn(count, 2), labels)
    largest = Largest()
    with largest:
        dp_em(data, classes, components, claim, torch.Generator())
    # A table of all records would have 1.6 million numbers.
    assert largest.numbers <= 20 * classes * components


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made while it is active."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_public_data_have_no_limits_without_a_policy(tmp_path: Path) -> None:
    node = NodeConfig(num_partitions=3, state_dir=str(tmp_path))
    many: dict[str, Any] = {
        "method": "local",
        "head.epochs": 10_000,
        "head.min-steps": 10**9,
        "image-size": 4096,
    }
    run = parse_run(many)
    check_work(run.plan.work(0, 0), PUBLIC_DATA, run.settings)
    asked(node, "identification", {"data": "digits"})
    assert not (tmp_path / REQUESTS_FILE).exists()


def test_a_received_model_may_not_name_more_classes_than_the_policy_allows(tmp_path: Path) -> None:
    from fedsurrogate.client_app.methods.job import SiteLimits
    from tests.client_app.methods.dpcvae.test_training import Site, run

    job = Site(tmp_path, run()).job()
    job.received_model()
    object.__setattr__(job, "limits", SiteLimits(most_classes=2))
    with pytest.raises(PolicyError, match="most-classes = 2: a model of 3 classes"):
        job.received_model()


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("kind", ["open", "private", "secure aggregation"])
def test_no_model_brings_a_frame_of_columns_to_a_site_that_hides_its_numbers(
    tmp_path: Path, framed: bool, kind: str
) -> None:
    """It would be a map of the features, by the coordinator alone."""
    from tests.client_app.methods.dpcvae.test_training import DIMENSION, Site, run

    summed = {"secure-aggregation": True, "colluding": 0.0, "dropouts": 0.2, "classes": "a,b,c"}
    more = {"open": {}, "private": {"epsilon": 6.0, "delta": 1e-5}, "secure aggregation": summed}[
        kind
    ]
    job = Site(tmp_path, run(**more)).job()
    assert job.payload is not None
    model = unpack_parameters(job.payload)
    frame = Frame(torch.zeros(DIMENSION), torch.ones(DIMENSION)).packed() if framed else b""
    sent = replace(model, header=replace(model.header, frame=frame))
    object.__setattr__(job, "payload", pack_parameters(sent))
    if framed and kind != "open":
        with pytest.raises(SurrogateError, match="a model with a frame of columns"):
            job.received_model()
    else:
        assert job.received_model().header.frame == frame
