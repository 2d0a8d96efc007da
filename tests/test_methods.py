"""Rules for every method of the registry; a new method is tested here without new code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.methods import METHODS, method_named
from fedsurrogate.common.methods.method import Field, Method, check_fields, count, load
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import Section
from fedsurrogate.server_app.refit import refit
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.reader import read_payloads
from fedsurrogate.strategies.base.federation import Federation
from tests.grid import ROOT, InProcessGrid, metrics_of, run_federation, sites
from tests.hostile import payload_of
from tests.registry import CLASSES, PLANS, SPECS, cases, settings_of
from tests.replies import left_out, mutations, refused, replies, spoiled

# Accuracy on the digits of methods that learn well in these short runs.
LEAST = {
    **{
        "local": 0.4, "ensemble": 0.7, "average": 0.7, "kd": 0.6, "fedavg": 0.75, "fedprox": 0.75,
    },
    **{"scaffold": 0.7, "dsfl": 0.7, "fedlambda": 0.75, "knn-per": 0.75, "fedrep": 0.6},
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_method_is_described_in_full(spec: Method) -> None:
    config = parse_run(settings_of(spec))
    plan = config.plan
    for name in ("name", "title", "paper"):
        assert getattr(spec, name).strip(), f"method {spec.name}: the registry needs its {name}"
    for target in (plan.combination.site, plan.combination.evaluate):
        assert callable(load(target)), f"method {spec.name}: {target} is no function of the site"
    strategy = plan.combination.strategy
    assert issubclass(load(strategy), Federation), f"method {spec.name}: {strategy} is no strategy"
    for section in (plan.training.section, *([spec.shown] if spec.shown else []), *spec.sections):
        assert isinstance(getattr(config.settings, section, None), Section), (
            f"method {spec.name}: no section {section!r}"
        )
    # A default whose form depends on the dimension leaves out some fields in few dimensions, and
    # others in many.
    few, many = (plan.messages.sizes(10, dimension, 400) for dimension in (64, 4096))
    for field in (*plan.messages.sends, *plan.messages.receives, *plan.messages.result):
        assert any(all(n > 0 for n in field.sizes(sizes)) for sizes in (few, many)), (
            f"method {spec.name}: field {field.name} has an empty axis"
        )
    work = plan.work(10, 64)
    assert all(value >= 0 for value in vars(work).values())
    assert plan.defences.available, (
        f"method {spec.name}: the registry needs its defences, 'none' at least"
    )
    assert plan.kind != "one-shot" or plan.combination.stored, (
        f"method {spec.name}: what is sent once is kept, so that it can be refitted"
    )


def test_an_unknown_method_is_refused_everywhere_alike() -> None:
    with pytest.raises(ConfigError, match=r"method = 'fedxyz'.*'fedpft'.*'knn-per'"):
        method_named("fedxyz")
    with pytest.raises(ConfigError, match=r"method = 'fedxyz'.*'fedpft'.*'knn-per'"):
        parse_run({"method": "fedxyz"})


def test_no_method_is_compared_by_name() -> None:
    for floor in ("common", "client_app", "strategies", "server_app"):
        for file in (ROOT / floor).rglob("*.py"):
            found = re.search(
                r"\.method(\.name)? (==|in|!=|not in|is) (?!METHODS|found|self\.policy)|\.method(\.name)?\.startswith",
                file.read_text(),
            )
            assert not found, f"{file}: compares {found and found[0]!r}; ask the plan"


@pytest.mark.parametrize("spec", cases(SPECS))
def test_a_run_learns_costs_what_the_plan_says_and_refuses_wrong_replies(
    tmp_path: Path, spec: Method
) -> None:
    settings, grid = settings_of(spec) | {"partition": "iid"}, InProcessGrid(sites(3))
    folder = run_federation(tmp_path, grid, **settings)
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert metrics["sites"]["used"] == 3
    assert metrics["accuracy"]["model"] > LEAST.get(spec.name, 0.2), (
        "a guess is right one time in ten"
    )
    assert set(metrics["accuracy"]["per_site"]) == {"0", "1", "2"}
    assert (metrics["privacy"] is None) == (not spec.needs_budget)
    config = parse_run(settings)
    sizes = config.plan.messages.sizes(10, 64, 479)
    planned = costs(parse_run({"sites": 3} | settings), 64, 10, 479, 20)[0]
    sent, received = grid.counted(1, ("train", "evaluate", "query.hello"))
    if not config.plan.training.sparse:
        sent += sum(left_out(payload_of(each.content)) for each in grid.replies(1))
    assert 0.95 * planned.up < sent < 1.05 * planned.up, (
        f"method {spec.name}: {sent} bytes up, with the zeros that tensors leave out; the plan says "
        f"{planned.up}"
    )
    assert (
        0.9 * received
        < planned.down
        < 1.05 * received + 2 * count(config.plan.messages.receives, sizes)
    )
    assert metrics["card"]["used"] == ["0", "1", "2"]
    assert spec.title in write_report(folder).read_text(), (
        f"method {spec.name}: the report names it by its title"
    )
    for payload, kind, check in replies(config, grid):
        assert not refused(check, payload)
        for changed in mutations(payload, kind, 20):
            # Any other exception would end the run.
            refused(check, changed)
        accepted = [name for name, changed in spoiled(payload, kind) if not refused(check, changed)]
        assert not accepted, f"method {spec.name}: a reply with {accepted[0]} was accepted"


@pytest.mark.parametrize(
    "own",
    [
        {"fedpft.covariance": "spherical"},
        # Little noise: components that do not stand out of it are dropped.
        {"fedpft.covariance": "spherical", "fedpft.components": 2, "epsilon": 200.0},
        {"fedpft.topology": "chain", "fedpft.covariance": "spherical"},
        {"fedpft.covariance": "gram", "secure-aggregation": True},
        {"method": "dpcvae", "dpcvae.rounds": 2},
        {"method": "dp-fedavg", "fedavg.rounds": 2, "fedavg.sample-rate": 1.0},
        pytest.param(
            {"method": "dp-fedavg", "fedavg.rounds": 5, "secure-aggregation": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda own: " ".join(str(value) for value in own.values()),
)
def test_a_private_run_costs_what_the_plan_says(
    tmp_path: Path, own: dict[str, str | int | bool]
) -> None:
    settings = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "classes": ",".join(map(str, range(10))),
        "sites": 3,
    } | own
    grid = InProcessGrid(sites(3))
    assert metrics_of(run_federation(tmp_path, grid, partition="iid", **settings))["status"] == "ok"
    config = parse_run(settings)
    planned = costs(config, 64, 10, 479, 20)[0]
    # Every message of the run, and the mean over the sites: in a chain a site's share depends on
    # its place.
    kinds = {message.metadata.message_type for message in grid.sent} - {
        "query.compare",
        "query.name",
    }
    sent, received = (
        sum(way) / 3
        for way in zip(*(grid.counted(node, tuple(kinds)) for node in range(3)), strict=True)
    )
    assert 0.85 * planned.up < sent < 1.1 * planned.up, "bytes up"
    zeros = 2 * count(config.plan.messages.receives, config.plan.messages.sizes(10, 64, 479))
    assert 0.9 * received < planned.down < 1.05 * received + zeros


@pytest.mark.parametrize(
    "spec", cases({n: each for n, each in METHODS.items() if PLANS[n].combination.stored})
)
def test_what_sites_sent_once_is_learned_from_again(tmp_path: Path, spec: Method) -> None:
    settings = settings_of(spec)
    folder = run_federation(tmp_path / "all", sites(3), **settings)
    assert len(read_payloads(folder)) == 3
    _, again = refit(folder)
    without, left = refit(folder, without=["1"])
    assert json.loads((without / "manifest.json").read_text())["sites"] == ["0", "2"]
    header, two = again.header, torch.tensor(left.header.classes == again.header.classes)
    assert header.classes
    assert two or left.header.classes != header.classes
    few = header.classes[:3]
    _, narrow = refit(folder, classes=few)
    assert narrow.header.classes == few


def test_tensors_are_checked_by_name_shape_and_range() -> None:
    fields = (Field("counts", "C", 0, 100), Field("sums", "C d"))
    good = {"counts": torch.tensor([1.0, 2.0]), "sums": torch.zeros(2, 5)}
    assert check_fields(fields, good, {"C": 2}) == {"C": 2, "d": 5}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"counts": torch.tensor([-1.0, 2.0])}, "counts: -1 is outside 0 to 100"),
        ({"counts": torch.tensor([float("nan"), 2.0])}, "counts: a number that is not finite"),
        ({"counts": torch.tensor([101.0, 2.0])}, "counts: 101 is outside 0 to 100"),
        ({"counts": torch.tensor([1.0])}, "counts of shape"),
        ({"sums": torch.zeros(3, 5)}, "sums of shape"),
        ({"sums": torch.zeros(2, 5, 1)}, "sums of shape"),
        ({"more": torch.zeros(1)}, "tensors counts, more, sums"),
    ]
    for change, message in wrong:
        with pytest.raises(SurrogateError, match=message):
            check_fields(fields, good | change, {"C": 2})
    assert count(fields, {"C": 2, "d": 5}) == 12


@pytest.mark.parametrize(
    "spec",
    # A private GAN learns in tests/strategies/dpcvae/test_runs.py, and one from secure aggregation in
    # test_summed.py there.
    cases(
        {
            name: each
            for name, each in METHODS.items()
            if each.private and not each.needs_budget and not each.adversarial
        }
    ),
)
def test_a_method_that_can_be_private_learns_with_a_budget(tmp_path: Path, spec: Method) -> None:
    settings = settings_of(spec) | {"epsilon": 8.0, "delta": 1e-5, "classes": CLASSES}
    metrics = metrics_of(run_federation(tmp_path, sites(3), partition="iid", **settings))
    assert metrics["status"] == "ok"
    assert metrics["accuracy"]["model"] > 0.2, "a guess is right one time in ten"
    assert metrics["privacy"]["epsilon"] <= 8.0 + 1e-9
    assert set(metrics["privacy"]["per_site"]) == {"0", "1", "2"}


@pytest.mark.parametrize(
    "spec",
    cases({n: each for n, each in METHODS.items() if each.summable and not each.adversarial}),
)
def test_a_method_whose_combination_is_a_sum_learns_from_a_secure_aggregation(
    tmp_path: Path, spec: Method
) -> None:
    settings = settings_of(spec) | {"fedpft.covariance": "gram"}
    settings |= {"secure-aggregation": True, "classes": CLASSES}
    metrics = metrics_of(run_federation(tmp_path, sites(3), partition="iid", **settings))
    assert metrics["status"] == "ok"
    assert metrics["accuracy"]["model"] > 0.2, "a guess is right one time in ten"
