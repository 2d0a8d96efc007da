"""FedPFT from surrogates that are there already: from bundles, and from what came over a network before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from common.config import RunConfig
from common.errors import SurrogateError
from common.wire import pack_question
from strategies.collect import Recorder
from strategies.fedpft import CENTRE_FILE, FedPFT
from strategies.outcome import Site


class Stored(FedPFT):
    """The coordinator's half of FedPFT, without a grid. Nothing is taken back to the sites but by hand.

    centre: what the sites were told to subtract, or None.
    """

    def __init__(self, config: RunConfig, recorder: Recorder, device: str, centre: Tensor | None) -> None:
        super().__init__(config, recorder, device)
        self._centre = centre

    def learn_from(self, found: Sequence[tuple[str, tuple[str, bytes] | SurrogateError]]) -> None:
        """Learn from surrogates' canonical bytes, each with the site whose it is known to be; or with why it is refused.

        Each with where it comes from. Of several of one site the first that is sound counts. Raises RunError when too few
        are left.
        """
        self.summary()
        self.recorder.event("invited", sites=len(found))
        if (question := pack_question(self._centre)) is not None:
            self.recorder.keep(CENTRE_FILE, question)
        for number, (source, content) in enumerate(found, 1):
            site = self.outcome.sites[number] = Site(name=source)
            if isinstance(content, SurrogateError):
                self._reject(number, str(content))
                continue
            name, payload = content
            if taken := [other for other in self.outcome.sites.values() if other.name == name and other.fate == "used"]:
                self._reject(number, f"a second surrogate of site {taken[0].name!r}")
                continue
            site.name, site.bytes_up = name, len(payload)
            self._take(number, payload, {})
        self._conclude()
