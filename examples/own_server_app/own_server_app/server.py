"""Your own ServerApp with a strategy of fedsurrogate, without a run folder.

Run it where fedsurrogate is installed: flwr run examples/own_server_app --stream --run-config
'method="fedlap"'
"""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsurrogate.strategies import DPCVAE, FedLAP, FedPFT

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy named by `method`, and print the model's shapes and metrics."""
    strategy = {"fedpft": FedPFT, "fedlap": FedLAP, "dpcvae": DPCVAE}[
        str(context.run_config["method"])
    ]
    result = strategy(context.run_config).start(grid=grid, initial_arrays=ArrayRecord())
    print({name: array.shape for name, array in result.arrays.items()})
    print(result.evaluate_metrics_clientapp)
