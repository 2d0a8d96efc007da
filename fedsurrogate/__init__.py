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

    model = fs.FederatedClassifier().fit(x, y, sites=names)    # an estimator of scikit-learn

Settings are keyword arguments: those of the run (`epsilon=2.0`), those of the method's section by
their own name (`rank=16`), and those of other sections as `section__key` (`head__epochs=5`).

`fit` decides nothing about release: a hospital's policy and ledger do, in the `site` command.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

# The other packages are in this folder: as links in a checkout. Where an archive has no links, as in
# the bundle that Flower makes, they are next to it.
if not Path(__file__).with_name("common").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from fedsurrogate._estimators import FederatedClassifier, FederatedRegressor, FederatedSurvival
    from fedsurrogate._images import features, labelled_features, register_backbone
    from fedsurrogate._model import ImageModel, Model
    from fedsurrogate._simulation import MethodTable, Result, methods, simulate
    from fedsurrogate._surrogate import (
        Surrogate,
        epsilon,
        fit,
        learn,
        load,
        noise_multiplier,
        noisy,
    )
    from fedsurrogate._sweep import Sweep, sweep
    from fedsurrogate.common.errors import (
        BackboneError,
        ConfigError,
        DataError,
        FedSurrogateError,
        PackageError,
        RunError,
        SealError,
        SurrogateError,
    )

    __version__: str

_MODULES = {
    "_estimators": ("FederatedClassifier", "FederatedRegressor", "FederatedSurvival"),
    "_images": ("features", "labelled_features", "register_backbone"),
    "_model": ("ImageModel", "Model"),
    "_simulation": ("MethodTable", "Result", "methods", "simulate"),
    "_surrogate": ("Surrogate", "epsilon", "fit", "learn", "load", "noise_multiplier", "noisy"),
    "_sweep": ("Sweep", "sweep"),
}
# All others are errors.
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BackboneError",
    "ConfigError",
    "DataError",
    "FedSurrogateError",
    "FederatedClassifier",
    "FederatedRegressor",
    "FederatedSurvival",
    "ImageModel",
    "MethodTable",
    "Model",
    "PackageError",
    "Result",
    "RunError",
    "SealError",
    "Surrogate",
    "SurrogateError",
    "Sweep",
    "__version__",
    "epsilon",
    "features",
    "fit",
    "labelled_features",
    "learn",
    "load",
    "methods",
    "noise_multiplier",
    "noisy",
    "register_backbone",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """A public name on first use: sites and coordinators import this package and need none."""
    if name == "__version__":
        from fedsurrogate.common.version import own_version

        value: Any = own_version()
    elif name in __all__:
        value = getattr(import_module(f"fedsurrogate.{_HOMES.get(name, 'common.errors')}"), name)
        if isinstance(value, FunctionType):
            from fedsurrogate._inputs import checked

            value = checked(value)
    else:
        raise AttributeError(f"module 'fedsurrogate' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
