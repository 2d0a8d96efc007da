"""What commands import, for the process that forks them: `tests/e2e/processes.py`."""

import matplotlib.pyplot
import sklearn.ensemble
import torchvision

import fedsurrogate.client_app.cli.main
import fedsurrogate.server_app.cli.main
import fedsurrogate.server_app.serverapp
from fedsurrogate.client_app.processes.app_process import import_all

__all__ = ["fedsurrogate", "matplotlib", "sklearn", "torchvision"]
import_all()
