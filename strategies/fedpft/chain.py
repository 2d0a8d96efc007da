"""FedPFT from site to site (section 4.2) at the coordinator."""

from __future__ import annotations

from flwr.app import MessageType
from flwr.serverapp import Grid

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import check_numbers
from fedsurrogate.common.privacy.mechanism import check_stated
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.common.wire.model_proto import unpack_classifier, unpack_relay
from fedsurrogate.common.wire.records import Info, to_record, unpack_surrogate
from fedsurrogate.common.wire.validation import Expectation, check_header, check_surrogate
from fedsurrogate.strategies.base.chain import Chain, Walk
from fedsurrogate.strategies.base.collection import Collection
from fedsurrogate.strategies.base.introductions import Group
from fedsurrogate.strategies.base.outcome import due_centre
from fedsurrogate.strategies.fedpft.strategy import learn

GIVE_HEAD = f"{MessageType.QUERY}.head"


class FedPFTChain(Chain):
    """A relay contains surrogates: one for the union of all sites so far, or under privacy one for
    each of them.
    """

    def last_reply(
        self, payload: bytes, relay: bytes | None, place: Expectation, group: Group
    ) -> AnySurrogate:
        """Parse and check a relay.

        Args:
            payload: the relay as the site extended it.
            relay: as the site received it; None for the first site.
            place: what is expected of the site's surrogate.
            group: the sites of the run.

        Returns:
            The last site's surrogate.

        Raises:
            SurrogateError: for a relay that is not as it must be.
        """
        config = self.config
        parts = unpack_relay(payload)
        before = unpack_relay(relay) if relay and config.settings.epsilon else []
        if parts[:-1] != before or len(parts) != len(before) + 1:
            raise SurrogateError(
                "the surrogates of earlier sites in the relay are not as they were"
            )
        surrogates = [unpack_surrogate(each) for each in parts]
        if (
            total := sum(sum(each.counts) for each in surrogates)
        ) > config.settings.head.max_samples:
            raise SurrogateError(
                f"the relay represents {total} records, above head.max-samples = "
                f"{config.settings.head.max_samples}"
            )
        for surrogate in surrogates:
            check_surrogate(surrogate, place)
            subtracted = due_centre(config, surrogate.claim, surrogate.dimension)
            check_stated(surrogate.claim, config.mechanism_for("record", subtracted))
        return surrogates[-1]

    def learn_from(
        self, grid: Grid, group: Group, walk: Walk, relay: bytes, deadline: float
    ) -> None:
        """Learn a head from the last site's unsealed relay.

        Without privacy the last site is then asked for its own head, which is the model if it is as
        it must be.

        Args:
            grid: through which the last site is asked.
            group: the sites of the run.
            walk: progress of the chain, which has ended.
            relay: of the last site.
            deadline: seconds to wait for the head.
        """
        config = self.config
        surrogates = [unpack_surrogate(each) for each in unpack_relay(relay)]
        for surrogate, payload in zip(surrogates, unpack_relay(relay), strict=True):
            self.recorder.surrogate(surrogate.header.site, payload)
        self.outcome.surrogates = surrogates
        learned = learn(surrogates, config, self.device, config.settings.classes)
        self._apply_defence(learned.defended)
        self.outcome.learned, self.outcome.model = learned, learned.head
        if config.settings.epsilon:
            return
        values: Info = {"run": config.digest, "lineage": walk.lineage}
        last = group.nodes.get(walk.done[-1])
        if last is None:
            self.recorder.event(
                "no-head",
                reason="the last site of the chain is not connected; a head is learned from its "
                "surrogate",
            )
            return
        for reply in Collection(
            grid, [self._message(GIVE_HEAD, last, to_record(None, values))], deadline
        ):
            site = self.outcome.sites[last]
            try:
                model = unpack_classifier(self._read(reply, site)[0] or b"", most=0)
                if not isinstance(model, Head) or model.dimension != group.dimension:
                    raise SurrogateError("the model is not a head for this backbone")
                check_header(model.header, Expectation.of(config, group.classes, group.fingerprint))
                check_numbers({"weight": model.weight, "bias": model.bias})
                self.outcome.model = model
            except SurrogateError as error:
                self.recorder.event(
                    "no-head",
                    site=site.name,
                    reason=f"{error}; a head is learned from its surrogate",
                )
