"""FedRep at the coordinator: it averages the body of the network; every site's head stays at the
site.
"""

from __future__ import annotations

from flwr.app import Message
from flwr.serverapp import Grid

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Network
from fedsurrogate.common.models.networks import body_of, fresh, parameters_of
from fedsurrogate.common.wire.records import Info, to_record
from fedsurrogate.strategies.base.collection import Collection
from fedsurrogate.strategies.base.federation import COMPARE
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.base.reported import share_in
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg.strategy import Updates


class Representation(Updates):
    """Training of a shared body in `fedavg.rounds` rounds.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = Representation({"method": "fedrep", "fedavg.rounds": 3})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('rounds', ['parameters'])
    """

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        training.model = body_of(training.model)
        return training

    def classifier(self, training: Training) -> Classifier:
        """The body with a head of zeros, which each site replaces by its own."""
        settings, classes = self.config.settings.fedavg, len(training.classes)
        # The seed has no effect: only the shapes of the head are used.
        whole = parameters_of(fresh(settings.kind, training.inputs, classes, settings.width))
        head = {
            name: tensor.zero_() for name, tensor in whole.items() if name not in training.model
        }
        return Network(
            training.header(), settings.kind, training.inputs, {**training.model, **head}
        )

    def _judged(self, grid: Grid, deadline: float, values: Info) -> Info:
        """In a simulation, the mean accuracy of the sites' own models on the whole test split.
        Raises SurrogateError.
        """
        used = [node for node, site in self.outcome.sites.items() if site.fate == "used"]
        info, payload = super()._judged(grid, deadline, values), self._payload()
        rest = [
            Message(to_record(payload, {"brief": True, "bytes": len(payload)}), node, COMPARE)
            for node in used[1:]
        ]
        infos = [
            info,
            *(self._read(reply, Site(name=""))[1] for reply in Collection(grid, rest, deadline)),
        ]
        known = [
            accuracy for each in infos if (accuracy := share_in(each, "accuracy.model")) is not None
        ]
        if len(known) < len(used):
            raise SurrogateError(
                f"{len(known)} of {len(used)} sites reported the accuracy of their own model"
            )
        return info | {"accuracy.model": sum(known) / len(known)}
