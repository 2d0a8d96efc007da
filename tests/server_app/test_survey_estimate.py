"""The estimate of a survey rises with epsilon and records, and is near what a run reaches."""

from __future__ import annotations

import pytest

from fedsurrogate.server_app.counting import estimate, features_with


def test_the_estimate_rises_with_epsilon_and_with_records_up_to_what_is_expected_without_noise() -> (
    None
):
    source = features_with(3, 16, 0.9)
    few, many = (estimate([[n] * 3] * 2, source)["accuracy"] for n in (15, 3000))
    assert few["1"] < few["4"]
    assert few["1"] < many["1"]
    assert many["4"] == pytest.approx(0.9, abs=0.04)


def test_counts_below_zero_and_classes_without_records_give_a_number() -> None:
    found = estimate([[-4, 0, 50], [-1, -2, 40]], features_with(3, 8, 0.9))
    assert all(0 <= value <= 1 for value in found["accuracy"].values())
    assert "estimated by simulating" in found["how"]
