"""The coordinator's step (sample and learn): ours against the recipe of Flower's FedPFT baseline,
on the same surrogates.

The recipe: sample every mixture once with scikit-learn and the same seed, store the samples as a
Python list, feed a DataLoader with batches of 32, and train 50 epochs with AdamW at 1e-4. Claim:
about 10 times faster, with an accuracy within two points.
"""

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from torch.utils.data import DataLoader

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.samples import stored_features
from benchmarks.harness.site_data import SiteData, make_surrogate
from benchmarks.harness.timing import paired
from fedsurrogate.client_app.datasets.partition import partition
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.surrogates.covariances import Diagonal, Spherical
from fedsurrogate.common.surrogates.surrogates import Surrogate
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn_from_samples as learn

Heads = dict[str, Head | torch.nn.Linear]


def recipe(surrogates: list[Surrogate]) -> torch.nn.Linear:
    samples = []
    for surrogate in surrogates:
        table, names = surrogate.mixtures, surrogate.header.classes
        assert isinstance(table.covariance, Diagonal | Spherical)
        for label, count in enumerate(table.counts.tolist()):
            rows = table.labels == label
            family = "spherical" if isinstance(table.covariance, Spherical) else "diag"
            mixture = GaussianMixture(int(rows.sum()), covariance_type=family, random_state=0)
            weights = table.weights[rows].double().numpy()
            mixture.weights_, mixture.means_ = weights / weights.sum(), table.means[rows].numpy()
            mixture.covariances_ = table.covariance.variances[rows].numpy()
            drawn, _ = mixture.sample(count)
            samples += [{"img": x, "label": int(names[label])} for x in drawn.astype(np.float32)]
    head = torch.nn.Linear(samples[0]["img"].shape[0], 10)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-4)
    loader = DataLoader(samples, batch_size=32, shuffle=True)  # type: ignore[arg-type]
    for _ in range(50):
        for batch in loader:
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(head(batch["img"]), batch["label"]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return head


def main() -> None:
    described(__doc__).parse_args()
    (features, labels), (unseen, truth) = (
        stored_features("cifar10", part) for part in ("train", "test")
    )
    names = tuple(map(str, range(10)))
    rows = []
    for family, components in (("spherical", 1), ("diag", 10)):
        run = parse_run(
            {"alpha": 0.1, "fedpft.covariance": family, "fedpft.components": components}
        )
        parts = partition(labels, None, Settings(alpha=0.1), 10)
        made = [
            make_surrogate(SiteData(features[part], labels[part], names, "x", str(site)), run)
            for site, part in enumerate(parts)
        ]
        surrogates = [unpack_surrogate(pack_surrogate(each.surrogate)) for each in made]
        heads: Heads = {}

        def ours(kept: list[Surrogate] = surrogates, run: Run = run, heads: dict = heads) -> None:  # type: ignore[type-arg]
            heads["ours"] = learn(kept, run.settings.head, 0, names)

        def theirs(kept: list[Surrogate] = surrogates, heads: dict = heads) -> None:  # type: ignore[type-arg]
            torch.manual_seed(0)
            heads["theirs"] = recipe(kept)

        mine, peer, ratio = paired(ours, theirs)
        accuracy = [
            float((head.weight @ unseen.T + head.bias[:, None]).argmax(0).eq(truth).float().mean())
            for head in heads.values()
        ]
        rows.append(
            (
                f"{family} K={components}",
                mine,
                peer,
                round(ratio, 1),
                *(round(100 * value, 2) for value in accuracy),
            )
        )
    columns = ("surrogates", "ours s", "recipe s", "times faster", "ours %", "recipe %")
    report(
        "server_step",
        "sample and learn from 10 sites' surrogates, CIFAR-10 features",
        columns,
        rows,
    )


if __name__ == "__main__":
    main()
