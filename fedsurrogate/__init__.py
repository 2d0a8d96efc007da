"""The public Python interface of fedsurrogate: the same code as the federation runs, in a notebook.

    import fedsurrogate as fs

    a = fs.fit(x_a, y_a, site="a")               # what site a would send
    b = fs.fit(x_b, y_b, site="b")
    model = fs.learn([a, b])                     # what the coordinator learns from both
    model.score(x_test, y_test)

    result = fs.simulate([(x_a, y_a), (x_b, y_b)], epsilon=2.0, delta=1e-5)
    result.accuracy, result.bytes, result.report()

    table = fs.sweep(10, data=images, backbone="torchvision:resnet18", grid={"epsilon": [1.0, 8.0]},
    delta=1e-5) table.to_frame(), table.plot("accuracy.png")

Settings are keyword arguments: those of the run (`epsilon=2.0`), those of the method's section by
their own name (`rank=16`), and those of other sections as `section__key` (`head__epochs=5`).

`fit` decides nothing about release: a hospital's policy and ledger do, in the `site` command.
"""

from common.version import own_version
from fedsurrogate._images import features, labelled_features, register_backbone
from fedsurrogate._model import ImageModel, Model
from fedsurrogate._privacy import epsilon, noise_multiplier, noisy
from fedsurrogate._simulation import Result, simulate
from fedsurrogate._surrogate import Surrogate, fit, learn, load
from fedsurrogate._sweep import Sweep, sweep

__version__ = own_version()

__all__ = [
    "ImageModel",
    "Model",
    "Result",
    "Surrogate",
    "Sweep",
    "__version__",
    "epsilon",
    "features",
    "fit",
    "labelled_features",
    "learn",
    "load",
    "noise_multiplier",
    "noisy",
    "register_backbone",
    "simulate",
    "sweep",
]
