"""What `flwr run` leaves when a run cannot start: Flower's command itself exits with 0; and budgets that no
noise keeps.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.lifecycle.before_start import check_start
from fedsurrogate.server_app.serverapp import app
from tests.grid import metrics_of, run_folders


def started(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Start the app as Flower does, with a grid to which no request is sent."""
    monkeypatch.setattr(flower(), "is_simulation", lambda grid: True)
    config = {name.replace("_", "-"): value for name, value in settings.items()}
    context = Context(3, 1, {}, RecordDict(), config)  # type: ignore[arg-type]
    app(SimpleNamespace(), context)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "method", "words"),
    [
        ({"alpha": -1.0}, "fedpft", "alpha"),
        ({"method": "fedavg", "alpha": "x"}, "fedavg", "alpha"),
        ({"method": "no-such"}, "fedpft", "no-such"),
        ({"epsilon": 1.0}, "fedpft", "delta"),
        ({"device": "cuda:77"}, "fedpft", "cuda:77"),
        ({"resume": "no-such-folder"}, "fedpft", "no-such-folder"),
    ],
)
def test_a_run_that_cannot_start_leaves_a_run_folder_with_the_reason(
    settings: dict[str, Any],
    method: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Exception, match=words):
        started(monkeypatch, output_dir=str(tmp_path), **settings)
    (folder,) = run_folders(tmp_path)
    metrics = metrics_of(folder)
    assert (metrics["status"], metrics["method"]) == ("failed", method)
    assert words in metrics["failure"]
    assert words in (folder / "report.html").read_text()


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        started(monkeypatch, output_dir=str(tmp_path / "file"))


BUDGET = {"delta": 1e-5, "classes": "a,b"}


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 50.0, "fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"},
        {"method": "fedlap", "epsilon": 1.0, "fedlap.noise-multiplier": 0.5},
        {"method": "dpcvae", "epsilon": 1.0, "dpcvae.noise-multiplier": 1.0},
    ],
)
def test_noise_that_cannot_keep_the_budget_is_refused_before_the_start(
    settings: dict[str, str | float],
) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        check_start(parse_run(BUDGET | settings), simulated=True)
