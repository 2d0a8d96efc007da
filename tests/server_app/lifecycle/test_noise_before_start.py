"""A budget that the noise cannot keep is refused before a run starts, not by its sites."""

import pytest

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.lifecycle.before_start import check_start

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
