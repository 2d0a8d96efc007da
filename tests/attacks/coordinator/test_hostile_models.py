"""A coordinator's model or settings for evaluation must not fail at a site without a reason."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsurrogate.client_app.features.extraction import Features
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures, usable
from fedsurrogate.client_app.methods.evaluation import checked_classifier
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Head, Quadratic
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier

RUN = parse_run({})
HEADER = Header("fedpft", RUN.digest, "coordinator", "backbone", ("a", "b"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("table", ["means", "whiteners", "bias"])
def test_discriminants_that_are_not_finite_are_refused(table, bad):
    tables = {"means": torch.ones(2, 3), "whiteners": torch.ones(2, 3), "bias": torch.zeros(2)}
    payload = pack_classifier(Quadratic(HEADER, **tables))
    assert unpack_classifier(payload).dimension == 3
    tables[table][1] = bad
    with pytest.raises(SurrogateError):
        unpack_classifier(pack_classifier(Quadratic(HEADER, **tables)))


@pytest.mark.parametrize(
    "model",
    [
        Head(HEADER, torch.ones(2, 3), torch.ones(2)),
        Quadratic(HEADER, torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2)),
    ],
)
def test_a_model_for_another_dimension_is_refused_with_a_reason(model: Classifier):
    own = LabelledFeatures(torch.ones(4, 5), torch.zeros(4, dtype=torch.int64))
    found = SiteFeatures(own, own, ("a", "b"), "backbone", 0.0, simulated=False)
    task = cast(Any, SimpleNamespace(run=RUN, found=found, payload=pack_classifier(model)))
    with pytest.raises(SurrogateError, match="dimension 3, this site has 5"):
        checked_classifier(task)


def test_a_record_that_a_power_makes_infinite_is_left_out():
    dataset = cast(Any, SimpleNamespace(patients=None, values=None, labels=torch.arange(3)))
    x = np.array([[1.0, 2.0], [1e30, 0.0], [3.0, 4.0]], dtype=np.float32)
    found = Features(torch.from_numpy(x), torch.ones(3, dtype=torch.bool), "", 0.0, False)
    assert usable(dataset, found, torch.arange(3), 2.0).labels.tolist() == [0, 2]
    assert usable(dataset, found, torch.arange(3), 1.0).labels.tolist() == [0, 1, 2]
