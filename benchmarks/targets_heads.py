"""Heads from sums for numbers, labels, times and bags, beside the same records pooled.

    python benchmarks/targets_heads.py --seeds 3 --only labels

Images are sample features of CIFAR-10 (MobileNetV2); without them only tables are measured. Sizes
of the objects, the 16 attributes and their missing annotations, and the bags are MADE UP from the
classes. Survival data are those inside scikit-survival and lifelines. Noise is one distributed noise,
delta 1e-5, drawn here as large as the product's. Sums of sites equal the sums of all records to
rounding, which tests show, so records are pooled here.
"""

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks._pseudo_values import pseudo_value_head
from benchmarks._target_data import (
    SURVIVAL_SETS,
    Labelled,
    Timed,
    attributes,
    bags,
    in_ball,
    log_sizes,
    timed,
)
from benchmarks.harness.options import described
from benchmarks.harness.results import kept_rows, report
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.targets.time import Time, widening_edges
from fedsurrogate.strategies.targets.number import Annotated, label_heads, number_head
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.time import Cells, risk_head, risk_of_rounds, second_code
from tests.coded import capped_code, coded, exact_code, noisy, number_sums

EPSILONS, DELTA = (1.0, 2.0, 4.0, 8.0), 1e-5
NAME = "targets-heads"
COLUMNS = ("part", "data", "measure", "head", "exact", *(f"epsilon {each:g}" for each in EPSILONS))
COLUMNS = (*COLUMNS, "deviation of exact", "runs", "of the trial")
Row = tuple[object, ...]


def sigma(epsilon: float, bound: float, share: float) -> float:
    """Standard deviation of a statistic's noise."""
    return gaussian_noise_multiplier(epsilon, DELTA) * bound / share**0.5


def full(*parts: tuple[float, int]) -> Tensor:
    """Values, each repeated."""
    values = [value for value, count in parts for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64)


def row(
    of: Sequence[str], results: Sequence[Sequence[float | None]], trial: str = ""
) -> tuple[object, ...]:
    """A row of the table: means over runs of the exact head and of each epsilon."""
    columns = list(zip(*results, strict=True))
    means = [
        None if None in column else round(statistics.mean(column), 4)  # type: ignore[type-var]
        for column in columns
    ]
    means += [None] * (1 + len(EPSILONS) - len(means))
    spread = round(statistics.pstdev([float(each[0] or 0) for each in results]), 4)
    return (*of, *means, spread, len(results), trial)


def r_squared(predicted: Tensor, true: Tensor) -> float:
    """Share of the variance that predictions (n,) explain."""
    return 1 - float((predicted - true).square().mean() / true.var(correction=0))


def ada_ssp(sums: CodedSums, low: float, high: float) -> tuple[Tensor, float]:
    """The peer AdaSSP (Wang 2018): the ridge that makes the noise small, by the smallest eigenvalue."""
    assert sums.noise is not None
    d, records, sd = len(sums.mean), sums.records, sums.noise.squares
    least = max(float(torch.linalg.eigvalsh(sums.covariance)[0]) * records - 1.5 * sd, 0.0)
    ridge = max(0.0, (d * torch.log(torch.tensor(2 * d / 0.05)).item()) ** 0.5 * sd - least)
    matrix = records * sums.covariance + ridge * torch.eye(d, dtype=torch.float64)
    cross = sums.sums[1] - sums.code[1] * sums.mean
    weight = torch.linalg.solve(matrix, cross)
    half, mean = (high - low) / 2, float(sums.code[1]) / records
    return half * weight, (low + high) / 2 + half * (mean - float(weight @ sums.mean))


def noisy_number(exact: CodedSums, epsilon: float, seed: int) -> CodedSums:
    """Sums of one number with the noise of the default shares."""
    s = {
        key: sigma(epsilon, 1.0, share)
        for key, share in (("n", 0.03), ("u", 0.06), ("uu", 0.03), ("z", 0.10), ("uz", 0.38))
    }
    code, sums = full((s["n"], 1), (s["u"], 1)), full((s["z"], 1), (s["uz"], 1))
    return noisy(exact, code, sums, sigma(epsilon, 1.0, 0.40), seed, s["uu"])


def numbers(seeds: int) -> Iterator[Row]:
    """R^2 of numbers."""
    from sklearn.linear_model import RidgeCV

    trial = {
        (10_000, 256): ".64 / .53 .57 .60 .62 (AdaSSP .38 .45 .51 .55)",
        (1_000, 64): ".55 / .28 .38 .44 .48 (AdaSSP .16 .24 .32 .39)",
        (10_000, 64): ".57 / .52 .54 .55 .56",
    }
    for records, d in trial:
        results: dict[str, list[list[float | None]]] = {"ours": [], "AdaSSP": [], "pooled": []}
        held: list[list[float | None]] = []
        for seed in range(seeds):
            z, y, test, true = log_sizes(records, d, seed)
            exact = number_sums(y[:, None], z, *SIZES)
            pooled = RidgeCV(torch.logspace(-5, 3, 17).numpy()).fit(z.numpy(), y.numpy())
            head = number_head(exact, [SIZES[0]], [SIZES[1]])
            own: list[float | None] = [r_squared(test @ head.weight[0] + head.bias[0], true)]
            errors = (test @ head.weight[0] + head.bias[0] - true).abs()
            covered: list[float | None] = [
                float((errors <= 1.96 * head.deviation[0]).double().mean())
            ]
            peer: list[float | None] = [own[0]]
            for epsilon in EPSILONS:
                released = noisy_number(exact, epsilon, seed)
                head = number_head(released, [SIZES[0]], [SIZES[1]])
                predicted = test @ head.weight[0] + head.bias[0]
                own.append(r_squared(predicted, true))
                inside = (predicted - true).abs() <= 1.96 * head.deviation[0]
                covered.append(float(inside.double().mean()))
                weight, bias = ada_ssp(released, *SIZES)
                peer.append(r_squared(test @ weight + bias, true))
            results["ours"].append(own)
            results["AdaSSP"].append(peer)
            predicted = torch.from_numpy(pooled.predict(test.numpy()))
            results["pooled"].append([r_squared(predicted, true)])
            held.append(covered)
        what = ("numbers", f"log size, n = {records}, d = {d}")
        yield row((*what, "R2", "ours"), results["ours"], trial[records, d])
        yield row((*what, "R2", "AdaSSP"), results["AdaSSP"])
        yield row((*what, "R2", "scikit-learn RidgeCV, pooled"), results["pooled"])
        yield row((*what, "coverage of 95 % intervals", "ours"), held, ".92 to .96 exact")


# Range of the logarithm of the sizes in metres, known in public.
SIZES = (-1.4, 2.4)


def tables(seeds: int) -> Iterator[Row]:
    """R^2 and coverage on tables of scikit-learn, without noise."""
    from sklearn.datasets import load_diabetes, load_digits
    from sklearn.linear_model import RidgeCV

    sets = {"diabetes": load_diabetes, "digits by value": load_digits}
    for name, load in sets.items():
        x, y = (torch.tensor(each, dtype=torch.float64) for each in load(return_X_y=True))
        low, high = float(y.min()), float(y.max())
        results: list[list[list[float | None]]] = [[], [], []]
        for seed in range(10):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            train, rest = order[: len(x) * 7 // 10], order[len(x) * 7 // 10 :]
            head = number_head(number_sums(y[train][:, None], x[train], low, high), [low], [high])
            predicted = x[rest] @ head.weight[0] + head.bias[0]
            inside = (predicted - y[rest]).abs() <= 1.96 * head.deviation[0]
            pooled = RidgeCV(torch.logspace(-5, 3, 33).numpy()).fit(x[train].numpy(), y[train])
            other = torch.from_numpy(pooled.predict(x[rest].numpy()))
            results[0].append([r_squared(predicted, y[rest])])
            results[1].append([r_squared(other, y[rest])])
            results[2].append([float(inside.double().mean())])
        trial = {"diabetes": (".477", ".476", ".96"), "digits by value": (".586", ".586", ".956")}
        heads = (("R2", "ours"), ("R2", "scikit-learn RidgeCV, pooled"), ("coverage", "ours"))
        for of, result, said in zip(heads, results, trial[name], strict=True):
            yield row(("numbers", name, *of), result, said)


def mean_area(scores: Tensor, labels: Tensor) -> float:
    """Mean AUROC over labels (n, L)."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels.numpy(), scores.numpy(), average="macro"))


def released_labels(data: Labelled, code: str, epsilon: float, seed: int) -> CodedSums:
    """Sums of a code of labels, with noise."""
    count, sets = data.labels.shape[1], len(data.members)
    if code == "exact":
        exact = coded(exact_code(data.labels)[:, 1:], data.features)
        rows = 2 * count
        noise = full((sigma(epsilon, count**0.5, 0.03), rows))
        sums = full((sigma(epsilon, count**0.5, 0.55), rows))
    else:
        most = float(code)
        exact = coded(capped_code(data.labels, data.site, sets, most), data.features)
        of = ((most**0.5, 0.02, 0.45), (1.0, 0.01, 0.10))
        parts = zip(of, (count, sets), strict=True)
        noise, sums = (
            full(*each)
            for each in zip(
                *(
                    ((sigma(epsilon, bound, own), n), (sigma(epsilon, bound, table), n))
                    for (bound, own, table), n in parts
                ),
                strict=True,
            )
        )
    return noisy(exact, noise, sums, sigma(epsilon, 1.0, 0.42), seed, centre=True)


def labels(seeds: int) -> Iterator[Row]:
    """AUROC of labels with missing annotations."""
    from sklearn.linear_model import LogisticRegression

    shared: list[list[float | None]] = []
    own, pooled = [], []
    for seed in range(seeds):
        data = attributes(5, 128, seed, uncertain=True)
        exact = coded(exact_code(data.labels), data.features)
        heads = label_heads(exact, Annotated.exact(exact, 16), data.names)
        test = data.test
        shared.append([mean_area(test @ heads.weight.T + heads.bias, data.truth)])
        of = [data.labels[:, j].isnan().logical_not() for j in range(16)]
        moments = [coded(torch.ones(int(m.sum()), 1).double(), data.features[m]) for m in of]
        each = label_heads(
            exact, Annotated.exact(exact, 16), data.names, [m.moment for m in moments]
        )
        own.append([mean_area(test @ each.weight.T + each.bias, data.truth)])
        scores = [
            LogisticRegression(C=0.05, max_iter=300)
            .fit(data.features[m].numpy() * 10, data.labels[m, j].numpy())
            .decision_function(test.numpy() * 10)
            for j, m in enumerate(of)
        ]
        pooled.append([mean_area(torch.tensor(scores).T, data.truth)])
    what = ("labels", "16 attributes, n = 10000, d = 128", "AUROC")
    yield row((*what, "shared moment"), shared, ".896")
    yield row((*what, "own moment"), own, ".900")
    yield row((*what, "scikit-learn LogisticRegression, pooled"), pooled, ".902")
    trial = {
        "exact": ".881 / .780 .820 .848 .864; rare .896 / .694 .769 .829 .862",
        "2": ".881 / .808 .846 .865 .874; rare .898 / .761 .845 .876 .890",
    }
    for code, said in trial.items():
        all_, rare = [], []
        for seed in range(seeds):
            data = attributes(15, 64, seed, uncertain=False)
            results = [(0.01, released_labels(data, code, 1e6, seed))]
            results += [(each, released_labels(data, code, each, seed)) for each in EPSILONS]
            areas: list[list[float | None]] = [[], []]
            for _, sums in results:
                members = data.members
                found = Annotated.exact(sums, 16) if code == "exact" else None
                heads = label_heads(sums, found or Annotated.capped(sums, members), data.names)
                scores = torch.zeros(len(data.truth), 16, dtype=torch.float64)
                at = [data.names.index(name) for name in heads.labels]
                scores[:, at] = data.test @ heads.weight.T + heads.bias
                areas[0].append(mean_area(scores, data.truth))
                areas[1].append(mean_area(scores[:, -4:], data.truth[:, -4:]))
            all_.append(areas[0])
            rare.append(areas[1])
        head = "exact code, sqrt(16)" if code == "exact" else f"capped code, P = {code}"
        what = ("labels", "16 attributes, n = 10000, d = 64, 15 sets")
        yield row((*what, "AUROC", head), all_, said)
        yield row((*what, "AUROC of four rare labels", head), rare)


def concordance(data: Timed, rows: Tensor, scores: Tensor) -> float:
    """Harrell's C."""
    from sksurv.metrics import concordance_index_censored

    event = data.events[rows].bool().numpy()
    return float(concordance_index_censored(event, data.times[rows].numpy(), scores.numpy())[0])


def cell_sums(data: Timed, rows: Tensor, edges: Tensor) -> CodedSums:
    """Sums of the cells of some records."""
    target = Time(("time", "event"), tuple(edges.tolist()))
    values = torch.stack([data.times[rows].double(), (data.events[rows] == 1).double()], 1)
    return coded(target.code(values), data.features[rows])


def edges_of(horizon: float, bins: int, ratio: float = 1.0) -> Tensor:
    """Edges of bins, (bins + 1,)."""
    return torch.tensor(widening_edges(horizon, bins, ratio), dtype=torch.float64)


def pooled_cox(data: Timed, train: Tensor, rest: Tensor) -> float:
    """C of scikit-survival's Cox model on the pooled records; its penalty by a held-out fifth."""
    import numpy as np
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    x = data.features.numpy()
    pairs = list(zip(data.events.bool().tolist(), data.times.tolist(), strict=True))
    y = np.array(pairs, dtype=[("event", bool), ("time", float)])

    def fitted(rows: Tensor, penalty: float) -> Tensor:
        model = CoxPHSurvivalAnalysis(alpha=penalty, ties="breslow", n_iter=50)
        return torch.from_numpy(model.fit(x[rows.numpy()], y[rows.numpy()]).coef_)

    inner, judged = train[: len(train) * 4 // 5], train[len(train) * 4 // 5 :]
    penalties = (1.0,) if len(x) > 5000 else (0.1, 1.0, 10.0, 100.0)
    best = max(
        penalties,
        key=lambda each: concordance(data, judged, data.features[judged] @ fitted(inner, each)),
    )
    return concordance(data, rest, data.features[rest] @ fitted(train, best))


def times(seeds: int) -> Iterator[Row]:
    """Concordance of survival models without noise."""
    trial = {
        "veterans": ".711 / .689 / .691",
        "rossi": ".596 / .593 / .599",
        "whas500": ".756 / .752 / .747",
        "gbsg2": ".657 / .654 / .655",
        "aids": ".738 / .730 / .733",
        "flchain": ".798 / .798 / .799",
    }
    for name in SURVIVAL_SETS:
        data, results = timed(name), {}
        for seed in range(2 if name == "flchain" else 10):
            order = torch.randperm(len(data.times), generator=torch.Generator().manual_seed(seed))
            train, rest = order[: len(order) * 7 // 10], order[len(order) * 7 // 10 :]
            horizon = float(data.times.max()) * 1.0001
            fits: dict[str, Callable[[Tensor], Tensor]] = {
                "cells, 20 even bins": lambda e, s=cell_sums, d=data, t=train: (
                    risk_head(s(d, t, e), calibrated=False).weight
                ),
                "pseudo-values, 20 even bins": lambda e, s=cell_sums, d=data, t=train: (
                    -pseudo_value_head(s(d, t, e), e).weight[0]
                ),
            }
            edges = edges_of(horizon, 20)
            for head, fit in fits.items():
                score = concordance(data, rest, data.features[rest] @ fit(edges))
                results.setdefault(head, []).append([score])
            wide = fits["cells, 20 even bins"](edges_of(horizon, 20, ratio=20.0))
            score = concordance(data, rest, data.features[rest] @ wide)
            results.setdefault("cells, 20 bins that widen 20-fold", []).append([score])
            pooled = pooled_cox(data, train, rest)
            results.setdefault("scikit-survival Cox, pooled", []).append([pooled])
        for head, result in results.items():
            said = f"pooled / cells / pseudo-values {trial[name]}"
            yield row(("times", name, "Harrell's C", head), result, said)


def private_times(seeds: int) -> Iterator[Row]:
    """Concordance of flchain with noise: one release of cells, and two rounds."""
    trial = {
        "one release, 10 cells": ".796 / .783 .789 .792 .794",
        "one release, 5 cells": "",
        "two rounds, 20 cells": ".796 / .785 .791 .794 .795",
    }
    data, results = timed("flchain"), {}
    ball = Timed(in_ball(data.features), data.times, data.events)
    for seed in range(seeds):
        order = torch.randperm(len(data.times), generator=torch.Generator().manual_seed(seed))
        train, rest = order[: len(order) * 7 // 10], order[len(order) * 7 // 10 :]
        horizon = float(data.times.max()) * 1.0001
        for head in trial:
            bins = int(head.split()[-2])
            exact = cell_sums(ball, train, edges_of(horizon, bins))
            scores: list[float | None] = []
            for epsilon in (1e6, *EPSILONS):
                release = two_rounds if head.startswith("two") else one_release
                weight = release(exact, epsilon, seed)
                scores.append(concordance(ball, rest, ball.features[rest] @ weight))
            results.setdefault(head, []).append(scores)
    for head, result in results.items():
        yield row(("times", "flchain, n = 5511, d = 15", "Harrell's C", head), result, trial[head])


def one_release(exact: CodedSums, epsilon: float, seed: int) -> Tensor:
    """Weights from cells with noise."""
    q = len(exact.code)
    code, sums = full((sigma(epsilon, 1, 0.03), q)), full((sigma(epsilon, 1, 0.55), q))
    released = noisy(exact, code, sums, sigma(epsilon, 1.0, 0.42), seed, centre=True)
    return risk_head(released, calibrated=False).weight


def two_rounds(exact: CodedSums, epsilon: float, seed: int) -> Tensor:
    """Weights from two rounds with noise: numbers of the cells, then residuals."""
    q, draw = len(exact.code), torch.Generator().manual_seed(seed + 1000)
    own = sigma(epsilon, 1.0, 0.05)
    noise = own * torch.randn(q, generator=draw, dtype=torch.float64)
    cells = Cells.of(exact.code + noise, own)
    values, _ = second_code(cells)
    table = torch.stack([torch.ones_like(values), values])
    second = CodedSums(table @ exact.code, table @ exact.sums, exact.moment)
    sums = full((sigma(epsilon, 1.0, 0.08), 1), (sigma(epsilon, 1.0, 0.45), 1))
    code = full((own, 1), (0.0, 1))
    released = noisy(second, code, sums, sigma(epsilon, 1.0, 0.42), seed)
    return risk_of_rounds(cells, released).weight


def bag_rows(seeds: int) -> Iterator[Row]:
    """AUROC of bags of images by the mean of their features."""
    trial = {
        ("share", 5, 20): ".872 / .854 at epsilon 4",
        ("check-log", 2, 5): ".687 / .656 at epsilon 4",
    }
    for (task, fewest, most), said in trial.items():
        results = []
        for seed in range(seeds):
            z, y, test, true = bags(task, (fewest, most), 64, seed)
            exact = coded(exact_code(y[:, None])[:, 1:], z)
            scores: list[float | None] = []
            for epsilon in (1e6, *EPSILONS):
                code, sums = (full((sigma(epsilon, 1, share), 2)) for share in (0.03, 0.55))
                spread = sigma(epsilon, 1.0, 0.42)
                released = noisy(exact, code, sums, spread, seed, centre=True)
                if epsilon == 1e6:
                    released = exact
                heads = label_heads(released, Annotated.exact(released, 1), ["finding"])
                scores.append(mean_area(test @ heads.weight.T, true[:, None]))
            results.append(scores)
        what = ("bags", f"{task}, {fewest} to {most} images, 1000 bags, d = 64")
        yield row((*what, "AUROC", "mean of the images"), results, said)


PARTS = {
    "tables": tables,
    "times": times,
    "private-times": private_times,
    "numbers": numbers,
    "labels": labels,
    "bags": bag_rows,
}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(PARTS), default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    named = [options.only] if options.only else list(PARTS)
    for name in named:
        rows = list(PARTS[name](options.seeds))
        fresh = {(each[0], each[1]) for each in rows}
        kept = kept_rows(NAME, lambda old, fresh=fresh: (old[0], old[1]) in fresh)
        title = "heads from sums, beside pooled records and a trial"
        report(NAME, title, COLUMNS, [*kept, *rows], seeds=options.seeds)


if __name__ == "__main__":
    main()
