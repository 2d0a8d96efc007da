"""AUROC of models of bags, through whole runs, beside centralized heads on the same bags.

    python benchmarks/bags.py --seeds 3

Claim: without noise a run on bags ranks as pooled logistic regression on the means of the same bags
does; where the label follows the share of images that show a finding, a label on each image is as
good; and nothing finds one image among twenty.

Bags are MADE UP from the classes of CIFAR-10 (features of MobileNetV2 in 64 public directions): 1,000
for training, at five sites, and 1,000 others for test. With epsilon a run is secure aggregation
with one distributed
noise, delta 1e-5. The label on each image is a run on single images with the labels of their bags, in
which a bag is a patient, who weighs one with epsilon; a bag then has the mean of its images' scores.
"""

import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedsurrogate as fs
from benchmarks._target_data import Bags, bag_images
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from fedsurrogate.server_app.deployment.local_engine import quiet

TASKS, IMAGES = ("share", "one cat", "half alike"), ((2, 5), (5, 20))
SITES, DIMENSIONS, DELTA = 5, 64, 1e-5
EPSILONS = (0.0, 4.0)
SETTINGS = {"covariance": "gram", "classes": ("0", "1")}
COLUMNS = ("task", "images", "model", "without noise", "epsilon 4", "deviation", "runs")
# Of training and test bags, an epsilon, and a seed: the AUROC.
Head = Callable[[Bags, Bags, float, int], float]


def names(labels: Tensor) -> list[str]:
    """Names of the classes of records (n,)."""
    return [str(int(label)) for label in labels]


def area(labels: Tensor, scores: Tensor) -> float:
    """Area under the ROC curve."""
    return float(roc_auc_score(labels.numpy(), scores.numpy()))


def private(epsilon: float) -> dict[str, float]:
    """Settings of a budget; none without one."""
    return {"epsilon": epsilon, "delta": DELTA} if epsilon else {}


def of_bags(train: Bags, test: Bags, epsilon: float, seed: int) -> float:
    """A run over five sites, whose records are bags."""
    sites, bags = [], []
    for site in range(SITES):
        own = train.bag % SITES == site
        sites.append((train.features[own].float(), names(train.labels[train.bag[own]])))
        bags.append(train.bag[own].tolist())
    more = {"secure_aggregation": True, "dropouts": 0.0} if epsilon else {}
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | private(epsilon) | more | {"seed": seed, "output_dir": folder}
        model = fs.simulate(sites, bags=bags, **settings).model
    return area(test.labels, torch.from_numpy(model.predict_proba(test.means.float()))[:, 1])


def of_images(train: Bags, test: Bags, epsilon: float, seed: int) -> float:
    """The label of a bag on each of its images, and the mean of the scores of a bag's images."""
    more = {"secure_aggregation": True, "dropouts": 0.0} if epsilon else {}
    with tempfile.TemporaryDirectory() as folder:
        for site in range(SITES):
            own = train.bag % SITES == site
            content = {
                "x": train.features[own].float(),
                "y": train.labels[train.bag[own]].long(),
                "patient": train.bag[own],
            }
            save_file(content, Path(folder) / f"site-{site}.safetensors", {"classes": "0,1"})
        settings = SETTINGS | private(epsilon) | more | {"seed": seed, "output_dir": folder}
        # Without noise a patient's images count one each.
        files = {"data_dir": folder, "patient_column": "patient"}
        files |= {"dataset": ",".join(f"site-{site}" for site in range(SITES))}
        model = fs.simulate(SITES, data="safetensors", **settings, **files).model
    chance = torch.from_numpy(model.predict_proba(test.features.float()))[:, 1].double()
    scores = torch.logit(chance.clamp(1e-9, 1 - 1e-9))
    total = torch.zeros(len(test.labels), dtype=torch.float64).index_add_(0, test.bag, scores)
    return area(test.labels, total / test.bag.bincount())


def logistic(train: Bags, test: Bags, epsilon: float, seed: int) -> float:
    """Logistic regression on the pooled means, its strength by validation."""
    x, other = train.means, test.means
    scale = x.std(0)
    head = LogisticRegressionCV(Cs=np.logspace(-4, 2, 7), cv=5, max_iter=1000)
    head.fit((x / scale).numpy(), train.labels.numpy())
    return area(test.labels, torch.from_numpy(head.decision_function((other / scale).numpy())))


HEADS: dict[str, tuple[Head, tuple[float, ...]]] = {
    "run over five sites, bags": (of_bags, EPSILONS),
    "label on each image": (of_images, EPSILONS),
    "logistic regression on pooled means": (logistic, (0.0,)),
}


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose name contains this text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for task in TASKS:
        for images in IMAGES if options.only in task else ():
            drawn = [bag_images(task, images, DIMENSIONS, seed) for seed in range(options.seeds)]
            for name, (head, epsilons) in HEADS.items():
                with quiet():
                    found = [
                        [head(*data, epsilon, seed) for seed, data in enumerate(drawn)]
                        for epsilon in epsilons
                    ]
                means = [round(statistics.mean(own), 4) for own in found]
                spread = round(statistics.pstdev(found[-1]), 4)
                cells = (means[0], means[1] if len(means) > 1 else None, spread, options.seeds)
                rows.append((task, f"{images[0]} to {images[1]}", name, *cells))
                print(*rows[-1], sep=" | ", flush=True)
    whole = "bags" if not options.only else "bags-part"
    report(whole, "AUROC on 1,000 test bags", COLUMNS, rows)


if __name__ == "__main__":
    main()
