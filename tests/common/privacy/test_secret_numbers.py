"""Secret random numbers have their distribution and come from the operating system only."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats

from fedsurrogate.common.privacy.gaussian_mechanism import repeatable, system_normals


def test_noise_is_standard_normal() -> None:
    draws = system_normals((400_001,))
    assert draws.dtype == torch.float64
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-4
    assert float(draws.var()) == pytest.approx(1, abs=0.015)
    pairs = draws[:400_000].reshape(-1, 2)
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 0.012
    assert [tuple(system_normals(shape).shape) for shape in ((), (0,), (3, 5))] == [
        (),
        (0,),
        (3, 5),
    ]


@pytest.mark.usefixtures("system_noise")
def test_no_seed_repeats_the_noise() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(system_normals((50,)))
    assert not (draws[0] == draws[1]).any()


@pytest.mark.usefixtures("system_noise")
def test_each_draw_has_a_new_key_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [bytes([number]) * 32 for number in (1, 2, 1)]
    monkeypatch.setattr("os.urandom", lambda count: keys.pop(0)[:count])
    first, second, again = (system_normals((50,)) for _ in range(3))
    assert torch.equal(first, again)
    assert not (first == second).any()


@pytest.mark.usefixtures("system_noise")
def test_numbers_repeat_within_a_seed_alone() -> None:
    def drawn(seed: str) -> list[float]:
        with repeatable(seed):
            return [*system_normals((3,)).tolist(), *system_normals((3,)).tolist()]

    first, again, other, outside = drawn("a"), drawn("a"), drawn("b"), system_normals((3,)).tolist()
    assert first == again
    assert len({*first, *other, *outside}) == 15
    with repeatable("a"), ThreadPoolExecutor() as pool:
        assert pool.submit(system_normals, (3,)).result().tolist() != first[:3]
