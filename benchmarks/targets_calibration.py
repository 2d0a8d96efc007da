"""How far probabilities of labels from noisy sums are from what happens, on hidden records.

    python benchmarks/targets_calibration.py --first 20 --seeds 3

Records and attributes are those of `targets_labels_runs.py`, MADE UP from classes of CIFAR-10; 15
sites annotate half of them each. Noise is the product's, drawn here for sums of all records: one
distributed noise, or as large as that of 15 sites together. Log loss, expected calibration error and
AUROC are means over labels with a head; a person who says the prevalence always has "prevalence".
"""

import statistics
import warnings

import torch
from torch import Tensor

from benchmarks._target_data import Labelled, attributes
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from fedsurrogate.common.models.class_metrics import calibration_error
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.target import CODE, SQUARES, SUMS
from fedsurrogate.strategies.targets.number import label_heads
from fedsurrogate.strategies.targets.strategy import annotated_of
from tests.coded import coded, noisy

NAME, SITES, DIMENSION, DELTA = "targets-calibration", 15, 64, 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
COLUMNS = ("code", "noise", "epsilon", "log loss", "worst label", "of the prevalence")
COLUMNS = (*COLUMNS, "calibration error", "AUROC", "labels")
Row = tuple[float, float, float, float]


def target_of(data: Labelled, capped: bool) -> Labels:
    """The target of a run with these label sets."""
    sets = [
        (str(site), tuple(name for name, own in zip(data.names, row, strict=True) if own))
        for site, row in enumerate(data.members.tolist())
    ]
    return Labels(tuple(data.names), tuple(sets), capped)


def of_labels(data: Labelled, capped: bool, epsilon: float, sites: int, seed: int) -> list[Row]:
    """Log loss, that of the prevalence, calibration error and AUROC of each label with a head."""
    from sklearn.metrics import roc_auc_score

    target = target_of(data, capped)
    exact = coded(target.code(data.labels), data.features)
    multiplier = gaussian_noise_multiplier(epsilon, DELTA) * sites**0.5
    noise = {
        each.name: multiplier * each.bound / each.share**0.5 for each in target.statistics(True)
    }
    code, sums = (torch.full((len(exact.code),), noise[name]).double() for name in (CODE, SUMS))
    released = noisy(exact, code, sums, noise[SQUARES], seed, centre=True)
    made = label_heads(released, annotated_of(released, target), data.names, calibrated=True)
    found = []
    for place, name in enumerate(made.labels):
        chance = (data.test @ made.weight[place] + made.bias[place]).sigmoid()
        truth = data.truth[:, data.names.index(name)]
        area = roc_auc_score(truth.numpy(), chance.numpy())
        error = calibration_error((truth == 1).numpy(), chance.numpy())
        usual = torch.full_like(chance, float(truth.mean()))
        found.append((log_loss(chance, truth), log_loss(usual, truth), float(error), float(area)))
    return found


def log_loss(chance: Tensor, truth: Tensor) -> float:
    """Mean of minus the log likelihood."""
    kept = chance.clamp(1e-6, 1 - 1e-6)
    return float(-(truth * kept.log() + (1 - truth) * (1 - kept).log()).mean())


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=20, help="first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = range(options.first, options.first + options.seeds)
    data = {seed: attributes(SITES, DIMENSION, seed, uncertain=False) for seed in seeds}
    rows = []
    for capped in (False, True):
        for where, sites in (("distributed", 1), ("at sites", SITES)):
            for epsilon in EPSILONS:
                found = [
                    row
                    for seed, own in data.items()
                    for row in of_labels(own, capped, epsilon, sites, seed)
                ]
                loss, usual, error, area = (list(each) for each in zip(*found, strict=True))
                means = [statistics.mean(each) for each in (loss, usual, error, area)]
                code = "capped" if capped else "exact"
                values = (means[0], max(loss), *means[1:])
                rows.append((code, where, epsilon, *(round(v, 4) for v in values), len(found)))
    title = "probabilities of labels from noisy sums, on hidden records"
    report(NAME, title, COLUMNS, rows, seeds=[*seeds])


if __name__ == "__main__":
    main()
