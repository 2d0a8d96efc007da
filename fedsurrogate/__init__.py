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

# By name for tools that read types; at run time a public name is imported when it is first used.
if TYPE_CHECKING:
    from fedsurrogate._estimators import FederatedClassifier as FederatedClassifier
    from fedsurrogate._estimators import FederatedRegressor as FederatedRegressor
    from fedsurrogate._estimators import FederatedSurvival as FederatedSurvival
    from fedsurrogate._images import features as features
    from fedsurrogate._images import labelled_features as labelled_features
    from fedsurrogate._images import register_backbone as register_backbone
    from fedsurrogate._model import ImageModel as ImageModel
    from fedsurrogate._model import Model as Model
    from fedsurrogate._simulation import MethodTable as MethodTable
    from fedsurrogate._simulation import Result as Result
    from fedsurrogate._simulation import methods as methods
    from fedsurrogate._simulation import simulate as simulate
    from fedsurrogate._surrogate import Surrogate as Surrogate
    from fedsurrogate._surrogate import epsilon as epsilon
    from fedsurrogate._surrogate import fit as fit
    from fedsurrogate._surrogate import learn as learn
    from fedsurrogate._surrogate import load as load
    from fedsurrogate._surrogate import noise_multiplier as noise_multiplier
    from fedsurrogate._surrogate import noisy as noisy
    from fedsurrogate._sweep import Sweep as Sweep
    from fedsurrogate._sweep import sweep as sweep
    from fedsurrogate.common.errors import BackboneError as BackboneError
    from fedsurrogate.common.errors import ConfigError as ConfigError
    from fedsurrogate.common.errors import DataError as DataError
    from fedsurrogate.common.errors import FedSurrogateError as FedSurrogateError
    from fedsurrogate.common.errors import PackageError as PackageError
    from fedsurrogate.common.errors import RunError as RunError
    from fedsurrogate.common.errors import SealError as SealError
    from fedsurrogate.common.errors import SurrogateError as SurrogateError

    __version__: str

_MODULES = {
    "_estimators": "FederatedClassifier FederatedRegressor FederatedSurvival",
    "_images": "features labelled_features register_backbone",
    "_model": "ImageModel Model",
    "_simulation": "MethodTable Result methods simulate",
    "_surrogate": "Surrogate epsilon fit learn load noise_multiplier noisy",
    "_sweep": "Sweep sweep",
    "common.errors": "BackboneError ConfigError DataError FedSurrogateError PackageError RunError SealError SurrogateError",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    """A public name on first use: sites and coordinators import this package and need none."""
    if name == "__version__":
        from fedsurrogate.common.version import own_version

        value: Any = own_version()
    elif name in _HOMES:
        value = getattr(import_module(f"fedsurrogate.{_HOMES[name]}"), name)
        if isinstance(value, FunctionType):
            from fedsurrogate._inputs import checked

            value = checked(value)
    else:
        raise AttributeError(f"module 'fedsurrogate' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
