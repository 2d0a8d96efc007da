"""Columns of a table with very different scale or offset: a site's own frame in messages, and public
ranges where nothing of a site alone may leave.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.sums import bounded_sums, message
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.secure_aggregation import settings_in
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.mixtures import Frame, PublicMap, public_frame
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.targets.strategy import FromCodedSums
from tests.coded import coded

SCALE = np.array([1.0, 1e6, 1e-4, 50.0, 1.0, 1e3])
OFFSET = np.array([0.0, 5e6, 1.0, 1000.0, 0.0, -2e4])
RANGES = "; ".join(f"{o - 4 * s},{o + 4 * s}" for o, s in zip(OFFSET, SCALE, strict=True))
SECURE: dict[str, Any] = {"secure_aggregation": True, "dropouts": 0.0}
PLAIN: dict[str, Scalar] = {"task": "regression", "target-range": "-4,4"}
PRIVATE: dict[str, Scalar] = {"epsilon": 4.0, "delta": 1e-5}


def table() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Standardised features, and the target of each kind."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(900, len(SCALE)))
    true = x @ np.array([0.5, 0.4, -0.5, 0.3, 0.2, -0.4])
    times = np.minimum(draw.exponential(size=900) * np.exp(-1.5 * true), 5.0)
    return x, {
        "regression": true + 0.5 * draw.normal(size=900),
        "multilabel": np.stack([true + 0.5 * draw.normal(size=900) > cut for cut in (0, 0.5)], 1)
        * 1.0,
        "survival": np.stack([times, times < 5.0], 1),
    }


TARGETS: dict[str, dict[str, Any]] = {
    "regression": {"task": "regression", "target_range": (-4, 4)},
    "multilabel": {"task": "multilabel", "label_columns": "a,b"},
    "survival": {"task": "survival", "horizon": 3.0, "bins": 8},
}
SCORES = {"regression": "r2", "multilabel": "auroc", "survival": "concordance"}


def score(folder: Path, x: np.ndarray, name: str, **more: Any) -> float:
    """The mean score of a run of three sites on their held-out records."""
    given = TARGETS[name] | {key.replace(".", "__"): value for key, value in more.items()}
    y = table()[1][given["task"]]
    sites = [(x[site::3].astype(np.float32), y[site::3]) for site in range(3)]
    metric_values = fs.simulate(sites, output_dir=folder, **given).metrics["metric_values"]["all"]
    return float(np.mean([own[SCORES[given["task"]]] for own in metric_values.values()]))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("regression", {}),
        ("multilabel", {}),
        ("regression", SECURE | {"features.ranges": RANGES}),
        ("multilabel", SECURE | {"features.ranges": RANGES, "label_sets": "0=a,b; 1=a,b; 2=a,b"}),
        ("survival", SECURE | {"features.ranges": RANGES}),
        ("survival", {"features.ranges": RANGES}),
        ("regression", SECURE | {"features.ranges": RANGES, "epsilon": 200.0, "delta": 1e-5}),
    ],
)
def test_columns_of_any_scale_score_as_standardised_ones(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    x, _ = table()
    plain = score(tmp_path / "a", x, name)
    assert score(tmp_path / "b", x * SCALE + OFFSET, name, **more) > plain - 0.02


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999))
def test_rescaled_sums_are_those_of_rescaled_records(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 4, generator=draw).double()
    factor = torch.rand(4, generator=draw).double() + 0.1
    code = torch.rand(30, 2, generator=draw).double()
    first, last = coded(code, x).rescaled(factor), coded(code, x * factor)
    assert torch.allclose(first.sums, last.sums)
    assert torch.allclose(first.covariance, last.covariance)
    assert torch.allclose(first.mean, last.mean)


def job_of(run: Run, x: torch.Tensor, values: torch.Tensor | None = None) -> Job:
    """A site, whose number is the first column."""
    assert run.target is not None
    labels = torch.zeros(len(x), dtype=torch.int64)
    train = LabelledFeatures(x.float(), labels, values=x[:, :1] if values is None else values)
    empty = LabelledFeatures(x[:0].float(), labels[:0])
    found = SiteFeatures(train, empty, run.target.rows, "f" * 16, 0.0, simulated=True)
    return Job(run, NodeConfig(), "north", found)


@settings(max_examples=25, deadline=None)
@given(
    offset=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    width=st.lists(st.floats(2.0**-10, 1e6, width=32), min_size=3, max_size=3),
    epsilon=st.sampled_from([0.0, 4.0]),
)
def test_a_record_in_the_ranges_is_in_the_ball(
    offset: list[float], width: list[float], epsilon: float
) -> None:
    text = "; ".join(f"{o},{o + w * 2}" for o, w in zip(offset, width, strict=True))
    frame = Frame.of(public_frame(text, 3, private=bool(epsilon)))
    corners = torch.tensor(np.stack(np.meshgrid(*[[0.0, 2.0]] * 3), -1).reshape(-1, 3))
    x = torch.tensor(offset) + corners * torch.tensor(width)
    # What single precision leaves of a width next to its offset.
    lost = float((torch.tensor(offset).abs() / torch.tensor(width)).max()) * 2e-7
    moved = frame.apply(x)
    assert float(moved.norm(dim=1).max()) <= (1.0 if epsilon else 3**0.5) * (1 + 4 * lost + 1e-6)
    if epsilon and lost < 1e-3:
        run = parse_run(PLAIN | PRIVATE | {"features.ranges": text})
        made = bounded_sums(job_of(run, x.float()), run.target, PublicMap())  # type: ignore[arg-type]
        assert made.claim is not None
        assert made.claim.clip == 1.0
        assert float(made.values["squares"].norm()) <= 8 * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), own=st.booleans())
def test_a_frame_that_the_settings_do_not_give_is_refused_in_private_runs(
    seed: int, own: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 3, generator=draw) * torch.tensor([1.0, 1e5, 1.0])
    more: dict[str, Scalar] = {"features.ranges": "-4,4; -4e5,4e5; -4,4"} if own else {}
    run = parse_run(PLAIN | more | PRIVATE)
    strategy = FromCodedSums(run)
    sent = strategy.unpack(run_site(run, x))
    lying = Frame(torch.randn(3, generator=draw).double(), torch.ones(3).double()).packed()
    with pytest.raises(SurrogateError, match="frame of columns"):
        strategy.unpack(pack_parameters(replace(sent, header=replace(sent.header, frame=lying))))


def run_site(run: Run, x: torch.Tensor) -> bytes:
    """A site's message."""
    return message(job_of(run, x)).payload


@pytest.mark.parametrize("frame", [b"", Frame(torch.ones(3), torch.ones(3)).packed()])
def test_a_site_reads_no_model_in_another_frame_than_the_settings_give(frame: bytes) -> None:
    given: dict[str, Scalar] = {"task": "survival", "horizon": 3.0, "time-head": "residuals"}
    run = parse_run(given | {"features.ranges": "0,8"})
    assert run.target is not None
    x = torch.rand(60, 3)
    job = job_of(run, x, torch.stack([x[:, 0] * 4, torch.ones(60)], 1).double())
    agreed = run.public_frame(3)
    training = Training.begin(run, run.target.rows, "f" * 16, 3, agreed)
    training.model = {"values": torch.zeros(41)}
    asked = replace(job, payload=training.payload(), info={"round": 2})
    assert message(asked).payload
    training.frame = frame
    with pytest.raises(SurrogateError, match="frame of columns"):
        message(replace(asked, payload=training.payload()))


def test_sums_with_other_ranges_are_other_sums_to_a_site() -> None:
    made = []
    for text in ("", "0,1", "0,2"):
        run = parse_run(PLAIN | {"secure-aggregation": True, "features.ranges": text})
        job = job_of(run, torch.rand(9, 2))
        made.append((settings_in(run, job.limits, b"")["numbers"], run.digest))
    assert len({each for each, _ in made}) == len({each for _, each in made}) == 3


@pytest.mark.parametrize("text", ["0,1; 0,1", "0,1e-40", "0,1e39"])
def test_ranges_of_other_columns_or_beyond_single_precision_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"features\.ranges"):
        public_frame(text, 3, private=False)
