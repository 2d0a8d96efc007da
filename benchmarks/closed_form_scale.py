"""The closed form for many sites, classes and dimensions: seconds and memory of the coordinator.

Without a defence it holds one matrix at a time, besides the means of all sites; the defence by harm
compares the means of all sites. The statistics go through the coordinator's own path: parsed, checked,
stored in a run folder, read again, learned.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from benchmarks.harness.options import described
from benchmarks.harness.plots import draw_growth
from benchmarks.harness.results import report
from benchmarks.harness.timing import peak
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.covariances import Gram
from fedsurrogate.common.surrogates.mixtures import Mixtures, MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.common.wire.records import pack_surrogate
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.strategies.closed_form.solvers import lda
from fedsurrogate.strategies.closed_form.statistics import pooled
from fedsurrogate.strategies.fedpft.strategy import FedPFT

CLASSES, DIMENSION, RECORDS = 10, 512, 40


def records(
    site: int, centres: torch.Tensor, basis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """RECORDS features of one site (n, d) and their labels; a site has three of the classes."""
    generator = torch.Generator().manual_seed(site)
    labels = torch.randperm(CLASSES, generator=generator)[:3][torch.arange(RECORDS) % 3]
    return centres[labels] + torch.randn(RECORDS, len(basis), generator=generator) @ basis, labels


class Payloads(Sequence[tuple[str, tuple[str, bytes]]]):
    """What the sites send, made one at a time."""

    def __init__(self, sites: int, run: str, centres: torch.Tensor, basis: torch.Tensor) -> None:
        self._sites, self._run, self._centres, self._basis = sites, run, centres, basis
        self.seconds = self.cpu = 0.0

    def __len__(self) -> int:
        return self._sites

    def truth(self) -> torch.Tensor:
        """Covariance (d, d) within classes of the records of all sites together, float64, from two
        passes over them.
        """
        counts = torch.zeros(CLASSES, dtype=torch.float64)
        d = self._basis.shape[1]
        sums, squares = (
            torch.zeros(CLASSES, d, dtype=torch.float64),
            torch.zeros(d, d, dtype=torch.float64),
        )
        for site in range(self._sites):
            x, y = records(site, self._centres, self._basis)
            counts += torch.bincount(y, minlength=CLASSES)
            sums.index_add_(0, y, x.double())
            squares.addmm_(x.double().T, x.double())
        means = sums / counts.clamp_min(1)[:, None]
        return (squares - (means * counts[:, None]).T @ means) / counts.sum()

    @overload
    def __getitem__(self, index: int) -> tuple[str, tuple[str, bytes]]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, tuple[str, bytes]]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> tuple[str, tuple[str, bytes]] | Sequence[tuple[str, tuple[str, bytes]]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < self._sites:
            raise IndexError(index)
        began, used = time.perf_counter(), time.process_time()
        x, y = records(index, self._centres, self._basis)
        present = y.unique()
        table = fit(
            x,
            torch.searchsorted(present, y),
            len(present),
            MixtureSettings("gram"),
            torch.Generator(),
        )
        header = Header(
            "fedpft", self._run, f"s{index}", "benchmark", tuple(map(str, present.tolist()))
        )
        payload = pack_surrogate(Surrogate(header, table))
        self.seconds += time.perf_counter() - began
        self.cpu += time.process_time() - used
        return header.site, (header.site, payload)


def many_sites(sites: int, defence: str, dimension: int) -> tuple[Any, ...]:
    """Seconds and memory of a coordinator that learns from `sites` whole covariances."""
    generator = torch.Generator().manual_seed(0)
    centres = 0.3 * torch.randn(CLASSES, dimension, generator=generator)
    basis = torch.randn(dimension, dimension, generator=generator) / dimension**0.5
    with tempfile.TemporaryDirectory() as folder:
        config = parse_run({"fedpft.covariance": "gram", "output-dir": folder, "defence": defence})
        strategy = FedPFT(config, RunWriter(config, 0), "cpu")
        payloads = Payloads(sites, config.digest, centres, basis)
        sample = payloads[0]
        payloads.seconds, payloads.cpu, began, used_cpu = (
            0.0,
            0.0,
            time.perf_counter(),
            time.process_time(),
        )
        strategy.learn_from(payloads)
        seconds = time.perf_counter() - began - payloads.seconds
        cpu = time.process_time() - used_cpu - payloads.cpu
        used = strategy.outcome.count("used")
        test = [records(-1 - i, centres, basis) for i in range(50)]
        model = strategy.outcome.model
        assert model is not None
        # What the coordinator pools from the stored messages, against the same records in one
        # place.
        names = tuple(map(str, range(CLASSES)))
        sent = [each for each in strategy.outcome.surrogates if isinstance(each, Surrogate)]
        held, truth = peak(), payloads.truth()
        apart = float((pooled(sent, names).covariance - truth).norm() / truth.norm())
        right = sum(model.accuracy(x, tuple(map(str, range(CLASSES))), y)[0] for x, y in test)
    label = f"{sites} sites, {CLASSES} classes, d = {dimension}, defence {defence}"
    spent = (seconds, cpu, strategy.outcome.seconds["learn"])
    return label, len(sample[1][1]), used, *spent, right / (50 * RECORDS), apart, held


def large(classes: int, dimension: int) -> Iterator[tuple[Any, ...]]:
    """Seconds and memory to pool five sites and to solve, with the shrinkage chosen and with a
    given one.
    """
    generator = torch.Generator().manual_seed(0)
    rows = 4 * dimension
    names, labels = tuple(map(str, range(classes))), torch.arange(rows) % classes
    x = torch.randn(classes, dimension, generator=generator)[labels] * 0.5 + torch.randn(
        rows, dimension, generator=generator
    )
    table = fit(x, labels, classes, MixtureSettings("gram"), generator)
    sites = [
        Surrogate(Header("fedpft", "", str(i), "", names), Mixtures(*vars(table).values()))
        for i in range(5)
    ]
    assert isinstance(table.covariance, Gram)
    began = time.perf_counter()
    statistics = pooled(sites, names)
    pooling = time.perf_counter() - began
    for shrinkage in (None, 0.1):
        began = time.perf_counter()
        solution = lda(statistics, shrinkage)
        how = (
            f"shrinkage chosen: {solution.shrinkage:.3g}"
            if shrinkage is None
            else f"shrinkage {shrinkage:g} given"
        )
        yield (
            f"{classes} classes, d = {dimension}, {how}",
            pooling,
            time.perf_counter() - began,
            peak(),
        )


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--sites", type=int, nargs="*", default=[10, 100, 1000, 10_000])
    parser.add_argument(
        "--defence",
        default="none",
        help="harm compares the means of all sites, which takes memory",
    )
    parser.add_argument("--dimension", type=int, default=DIMENSION)
    parser.add_argument("--part", choices=("sites", "sizes"), help="only one of the two tables")
    options = parser.parse_args()
    if options.part != "sizes":
        columns = (
            "federation",
            "bytes a site",
            "used",
            "coordinator s",
            "coordinator CPU s",
            "of these learning s",
        )
        columns = (
            *columns,
            "accuracy",
            "relative difference from pooled records",
            "peak GB so far",
        )
        name = "closed_form_sites" + ("" if options.defence == "none" else f"_{options.defence}")
        rows = [many_sites(n, options.defence, options.dimension) for n in options.sites]
        report(name, "Whole covariances of many sites", columns, rows)
        draw_growth(
            name,
            options.sites,
            {"coordinator": [row[4] for row in rows]},
            [row[-1] for row in rows],
        )
    if options.part != "sites":
        rows = [row for sizes in ((10, 512), (1000, 2048), (1000, 4096)) for row in large(*sizes)]
        report(
            "closed_form_sizes",
            "Closed-form heads of size",
            ("head", "pool s", "solve s", "peak GB so far"),
            rows,
        )


if __name__ == "__main__":
    main()
