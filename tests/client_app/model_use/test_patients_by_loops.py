"""Answers for patients from the rows of their images, and which file of answers is continued."""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.prediction import (
    ABSTAIN,
    DECISION,
    FILE,
    PROBLEM,
    _whole_rows,
    by_patient,
)
from fedsurrogate.common.escapes import csv_text

CLASSES = ("a", "b", "c")
# Patient, issuer, probabilities of a and b in tenths, and what became of the image.
ROW = st.tuples(
    st.sampled_from(["P", "P", "P", "Q", "", " "]),
    st.sampled_from(["", "X", "Y"]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["used", "used", "problem", "abstain"]),
)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(ROW, max_size=9), issued=st.booleans())
@example(rows=[("P", issuer, 1, 1, "used") for issuer in ("", "X", "Y")], issued=True)
def test_a_patient_has_the_mean_of_the_images_that_were_answered(
    rows: list[tuple[str, str, int, int, str]], issued: bool
) -> None:
    header = [FILE, "patient", *(["issuer"] if issued else [])]
    header += [*(f"p_{name}" for name in CLASSES), DECISION, PROBLEM]
    lines, members, left = [], defaultdict[Any, list[Any]](list), defaultdict[Any, int](int)
    issuers = defaultdict[str, set[str]](set)
    for name, issuer, *_ in rows:
        if name.strip():
            issuers[name] |= {issuer} - {""} if issued else set()
    for number, (name, issuer, a, b, became) in enumerate(rows):
        chances = [a / 10, b / 10, 1 - (a + b) / 10]
        decision = {"abstain": ABSTAIN, "problem": ""}.get(became, "a")
        cells = [f"{number}.png", name, *([issuer] if issued else [])]
        lines.append([*cells, *map(repr, chances), decision, "broken" * (became == "problem")])
        if not name.strip():
            continue
        only = next(iter(issuers[name])) if len(issuers[name]) == 1 else ""
        key = name, (issuer or only) if issued else ""
        left[key] += became != "used"
        members[key] += [chances] if became == "used" else []
    with TemporaryDirectory() as folder:
        file = Path(folder, "p.csv")
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows([header, *lines])
        count = by_patient(file, Path(folder, "q.csv"), Calibration(), CLASSES)
        with Path(folder, "q.csv").open(newline="") as stream:
            found = list(csv.DictReader(stream))
    assert count == len(found) == len(left)
    for row in found:
        own = members[row["patient"], row.get("issuer", "")]
        assert int(row["left_out"]) == left[row["patient"], row.get("issuer", "")]
        assert int(row["images"]) == len(own)
        if not own:
            assert (row["p_a"], row[DECISION]) == ("", ABSTAIN)
            continue
        mean = np.mean(own, 0)
        assert [float(row[f"p_{name}"]) for name in CLASSES] == pytest.approx(mean.tolist())
        # One of the likeliest classes, where two are as likely.
        assert math.isclose(mean[CLASSES.index(row[DECISION])], mean.max(), abs_tol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.text('ab",\n', min_size=1, max_size=5), min_size=1, max_size=5),
    share=st.floats(0, 1),
)
def test_a_file_that_was_cut_anywhere_keeps_its_whole_rows(names: list[str], share: float) -> None:
    """A name may hold quotes and ends of lines, so not each end of a line ends a row."""
    rows = [csv_text([[name, 0.5]]).encode() for name in names]
    ends = [0, *itertools.accumulate(map(len, rows))]
    cut = int(share * ends[-1])
    kept = _whole_rows(BytesIO(b"".join(rows)[:cut]))
    assert kept == max(end for end in ends if end <= cut)
