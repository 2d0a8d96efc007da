"""The cells of histograms in which a survey counts the images of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from fedsurrogate.common.image_histograms import Histogram, maker_among
from fedsurrogate.common.machine import usable_cores

from ..datasets.dataset import Dataset
from ..datasets.image_facts import SIDE, of_pixels
from ..datasets.left_out import attempt
from ..datasets.records import Facts


def image_cells(dataset: Dataset, histograms: Mapping[str, Histogram]) -> Tensor:
    """The cell of each record in each histogram; of a bag those of its first image.

    What a file does not state, and all of a broken one, is unknown. A record decides its own cells
    alone.

    Args:
        dataset: the records.
        histograms: by name, Q.

    Returns:
        (n, Q), float32.
    """
    if dataset.members is not None and dataset.whole is not None and dataset.rows is not None:
        places, images = dataset.rows.tolist(), dataset.whole
    else:
        places, images = list(range(len(dataset))), dataset
    with ThreadPoolExecutor(max(1, usable_cores())) as pool:
        facts = pool.map(partial(_facts, images), places)
        rows = [[_cell(name, own, each) for name, each in histograms.items()] for own in facts]
    return torch.tensor(rows, dtype=torch.float32).reshape(len(places), len(histograms))


def _facts(dataset: Dataset, row: int) -> Facts:
    describe, facts = dataset.describe, Facts()
    for read in (
        None if describe is None else partial(describe, row),
        None if dataset.opener is None else lambda: of_pixels(dataset.open_image(row, SIDE)),
    ):
        own = {} if read is None else attempt(read)
        facts |= {} if isinstance(own, BaseException) else own
    return facts


def _cell(name: str, facts: Facts, histogram: Histogram) -> int:
    value = facts.get(name)
    if name == "maker" and isinstance(value, str):
        value = maker_among(value, histogram.names)
    return histogram.cell(value)
