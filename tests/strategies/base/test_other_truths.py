"""Sites that say yes and no in other words, of which two classes would become four."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.identity import normal
from fedsurrogate.strategies.base.identifications import Identification, other_truths, settle

N = 40
X = np.random.default_rng(0).normal(size=(N, 3))
HALF = np.arange(N) % 2
# What a site may write for no and yes.
WORDS: dict[str, Any] = {
    "truth": np.array([False, True]),
    "numbers": np.array([0, 1]),
    "floats": np.array([0.0, 1.0]),
    "texts": np.array(["no", "yes"]),
    "capitals": np.array(["No", "Yes"]),
    "findings": np.array(["absent", "present"]),
    "letters": np.array(["N", "Y"]),
    "short": np.array(["neg", "pos"]),
}
SAME = [("numbers", "floats"), ("truth", "truth"), ("texts", "texts")]
OTHER = [("truth", "numbers"), ("floats", "texts"), ("texts", "capitals"), ("truth", "findings")]
OTHER += [("texts", "letters"), ("short", "numbers")]


@pytest.mark.parametrize(("first", "second"), [*SAME, *OTHER])
@pytest.mark.parametrize("entrance", ["learn", "simulate", "fedavg", "score"])
def test_two_classes_never_become_four(
    first: str, second: str, entrance: str, tmp_path: Path
) -> None:
    labels = [WORDS[first][HALF], WORDS[second][HALF]]

    def run() -> Any:
        if entrance == "score":
            # Each record would be wrong.
            model = fs.learn([fs.fit(X, labels[0])])
            assert model.score(X, labels[1]) == model.score(X, labels[0])
            return model
        if entrance == "learn":
            return fs.learn([fs.fit(X, y, site=site) for y, site in zip(labels, "ab", strict=True)])
        more = {"method": "fedavg", "fedavg__rounds": 1} if entrance == "fedavg" else {}
        sites = [(X + at, y) for at, y in enumerate(labels)]
        return fs.simulate(sites, output_dir=tmp_path, **more).model

    if (first, second) in SAME:
        assert len(run().classes_) == 2
        return
    with pytest.raises(FedSurrogateError, match=r"likely the same in other words; write the same"):
        run()


def test_one_site_that_writes_both_ways_is_not_called_two(tmp_path: Path) -> None:
    labels = np.array(["no", "Yes", "yes"])[np.arange(N) % 3]
    with pytest.raises(FedSurrogateError, match="classes Yes, no, yes are likely the same"):
        fs.simulate([(X, labels)], output_dir=tmp_path)


names = st.sampled_from(["0", "1", "True", "False", "yes", "Yes", "no", "mild", "2", "absent"])


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcdefghij"), st.lists(names, min_size=1, max_size=3, unique=True)
    )
)
def test_those_that_stay_agree_and_one_stays(classes: dict[str, list[str]]) -> None:
    try:
        gone = other_truths(classes)
    except RunError:
        kinds = Counter(tuple(sorted(own)) for own in classes.values()).values()
        assert list(kinds).count(max(kinds)) > 1, "only in a tie"
        return
    kept = {name: own for name, own in classes.items() if name not in gone}
    assert bool(kept) == bool(classes)
    assert not other_truths(kept)
    # Whoever has a class beside yes and no stays.
    assert all({"mild", "2"}.isdisjoint(map(normal, classes[name])) for name in gone)


def test_rounds_begin_without_the_site_that_writes_other_words() -> None:
    print_ = "f" * 64
    sites = {
        node: Identification(f"s{node}", print_, 8, own, "", False)
        for node, own in enumerate([("0", "1"), ("False", "True"), ("0", "1"), ("1",)])
    }
    group, others = settle(sites, (), "")
    assert (group.classes, list(others)) == (("0", "1"), [1])
    assert "'False', 'True'" in others[1]
    # The settings decide where they name classes.
    assert not settle(sites, ("0", "1"), "")[1]
