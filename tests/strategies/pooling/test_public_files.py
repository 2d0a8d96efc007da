"""Public files of secure aggregation that cannot be used, and what a total says of its features."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.pooling.class_means import read_centre, read_map, read_public
from fedsurrogate.strategies.pooling.site_weights import Total, shares_kept
from tests.strategies.pooling.test_public_projection import SECURE

HEADER = Header("fedpft", "r", "coordinator", "f", ("a", "b", "c"))


def test_public_features_are_a_finite_table_of_records(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.tensor([[4.0, -9.0], [16.0, 1.0]])}, file)
    assert read_public(str(file)).tolist() == [[4, -9], [16, 1]]
    assert read_public(str(file)).dtype == torch.float64
    centre = read_centre(str(file), 0.5)
    assert centre is not None
    assert centre.tolist() == pytest.approx([3.0, -1.0], abs=2e-3)
    assert read_centre(str(file)).tolist() == pytest.approx([10.0, -4.0], abs=1e-2)  # type: ignore[union-attr]
    assert read_centre("") is None
    for table in (
        *(torch.ones(shape) for shape in ((3,), (1, 2, 2), (0, 2), (2, 0))),
        *(torch.tensor([[1.0, hole]]) for hole in (torch.nan, torch.inf)),
    ):
        save_file({"x": table}, file)
        reason = rf"x of shape \({', '.join(map(str, table.shape))},?\) must be \(n, d\) and finite"
        with pytest.raises(ConfigError, match=reason):
            read_public(str(file))
    save_file({"y": torch.ones(2, 2)}, file)
    (tmp_path / "broken").write_bytes(b"broken")
    huge = b'{"x":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'
    (tmp_path / "huge").write_bytes(len(huge).to_bytes(8, "little") + huge)
    for other in (file, tmp_path, tmp_path / "missing", tmp_path / "broken", tmp_path / "huge"):
        with pytest.raises(ConfigError, match=r"fedpft.public = .*: (no readable|x of shape)"):
            read_public(str(other))


def test_a_projection_is_a_finite_matrix_for_the_features_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.safetensors"
    run = parse_run(SECURE | {"features.projection": str(file), "features.dimensions": 2})

    def refusal(tensors: dict[str, Any]) -> str:
        save_file(tensors, file)
        with pytest.raises(ConfigError) as found:
            read_map(run, 4)
        return str(found.value)

    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for fine in (None, {"other": "1"}, {"power": "1"}):
        save_file({"projection": rows}, file, fine)
        made = read_map(run, 4)
        assert made.centre is None
        torch.testing.assert_close(made.projection, rows[:2], atol=2e-3, rtol=2e-3)
    needs = "needs a finite matrix named projection, or a head named fc.weight"
    holes = torch.full((2, 4), torch.inf)
    for tensors in (*({"projection": each} for each in (rows[0], rows[None], holes)), {"y": rows}):
        assert needs in refusal(tensors)
    of_earlier = refusal({"projection": rows, "centre": torch.ones(4)})
    assert "has a tensor 'centre'" in of_earlier
    assert "name features of public images in fedpft.public" in of_earlier
    for content in (b"", b"broken"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="no readable safetensors file"):
            read_map(run, 4)
    file.unlink()
    with pytest.raises(ConfigError, match="no readable safetensors file"):
        read_map(run, 4)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_head_of_a_total_has_the_map_of_the_sites_and_their_columns(mapped: bool) -> None:
    public = PublicMap(torch.ones(2, 7), torch.ones(7)) if mapped else PublicMap()
    total = Total(HEADER, {"sums": torch.ones(3, 2)}, public=public)
    assert total.dimension == (7 if mapped else 2)
    head = Head(HEADER, torch.ones(3, 2), torch.zeros(3))
    found = total.mapped(head, b"frame")
    assert found.header.frame == b"frame"
    assert found.projection is public.projection
    assert found.centre is public.centre
    assert torch.equal(found.weight, head.weight)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.sampled_from([0.0, 1.0, 7.0]))
def test_counts_that_noise_alone_may_give_say_nothing_of_a_usual_site(
    classes: int, noise: float
) -> None:
    # The mean of the positive part of a normal, and two deviations of so many.
    mean, variance = 1 / math.sqrt(2 * math.pi), 0.5 - 1 / (2 * math.pi)
    fewest = 10 + noise * (classes * mean + 2 * math.sqrt(classes * variance))
    for share, usual in ((0.999, 1e6), (1.001, 1.001 * fewest)):
        small = [[share * fewest / classes] * classes for _ in range(30)]
        large = [[1e6 / classes] * classes for _ in range(12)]
        found = shares_kept([*small, *large], 1.0, 1.0, noise)
        assert found[-1] == pytest.approx(min(1.0, usual / 1e6))
        assert found[0] == 1
