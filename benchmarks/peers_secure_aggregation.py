"""What a site computes in secure aggregation, beside Flower's SecAgg+ with the same number of sites: dealing
shares of its secrets, reading those of the others, and masking a vector.

    python benchmarks/peers_secure_aggregation.py --sites 10 100

Both from their own functions, without messages. Flower's has 32 bits as well, and a share for every
site. Ours signs the list of keys and checks all signatures, which Flower's does not. Times are of the
processor, in turn.
"""

import copy
import importlib
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.timing import Work, in_turn, ratio
from fedsurrogate.common.secure_aggregation.protocol import begin, mask, share
from fedsurrogate.common.secure_aggregation.rules import FixedPoint, SumRules
from fedsurrogate.common.security.sealing import public_key

THRESHOLD = 2 / 3
# The package has a function of the same name.
flower: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")


def ours(sites: int, values: torch.Tensor) -> Work:
    """The steps of one site; the others have done theirs."""
    rules = SumRules.of(sites, colluding=1 / 3, dropouts=1 / 3)
    lasting = [os.urandom(32) for _ in range(sites)]
    context = os.urandom(32)
    begun = [begin(f"site-{i:03}", key, context) for i, key in enumerate(lasting)]
    members = [member for _, member in begun]
    fixed = FixedPoint.of(1.0, 1000, sites)

    def shares(index: int) -> Any:
        state, own = begun[index][0], public_key(lasting[index])
        return share(state, members, rules, own, smallest_sum=3)

    dealt = [shares(index)[1] for index in range(sites)]

    def work() -> None:
        state, _ = shares(0)
        mask(state, dealt, rules, fixed.encode(values))

    return work


def flowers(sites: int, values: torch.Tensor) -> Work:
    """The same of Flower's SecAgg+."""
    configs: Any = {
        Key.SAMPLE_NUMBER: sites,
        Key.SHARE_NUMBER: sites,
        Key.THRESHOLD: int(THRESHOLD * sites) + 1,
        Key.CLIPPING_RANGE: 8.0,
        Key.TARGET_RANGE: 1 << 22,
        Key.MOD_RANGE: 1 << 32,
        Key.MAX_WEIGHT: 1000.0,
    }
    states, keys = [], {}
    for node in range(sites):
        state = flower.SecAggPlusState()
        state.nid = node
        sent = flower._setup(state, configs)
        states.append(state)
        keys[str(node)] = (sent[Key.PUBLIC_KEY_1], sent[Key.PUBLIC_KEY_2])
    received: Any = {Key.SOURCE_LIST: [], Key.CIPHERTEXT_LIST: []}
    for node in range(1, sites):
        sent = flower._share_keys(copy.deepcopy(states[node]), keys)
        at = list(sent[Key.DESTINATION_LIST]).index(0)
        received[Key.SOURCE_LIST].append(node)
        received[Key.CIPHERTEXT_LIST].append(sent[Key.CIPHERTEXT_LIST][at])
    parameters = ndarrays_to_parameters([values.numpy().astype(np.float32)])

    def work() -> None:
        state = copy.copy(states[0])
        flower._share_keys(state, keys)
        flower._collect_masked_vectors(state, received, 1000, parameters)

    return work


def main() -> None:
    """Measure both at every number of sites."""
    options = described(__doc__)
    options.add_argument("--sites", type=int, nargs="+", default=[10, 100])
    options.add_argument("--numbers", type=int, default=100_000)
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    torch.set_num_threads(1)
    values = torch.rand(given.numbers, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows = []
    for sites in given.sites:
        works = {"ours": ours(sites, values), "Flower's SecAgg+": flowers(sites, values)}
        times = in_turn(works, given.repeats, warm=1, clock=time.process_time)
        for name, seconds in times.items():
            three = (min(seconds), statistics.median(seconds), max(seconds))
            over = ratio(times["Flower's SecAgg+"], seconds)
            rows.append((sites, name, *(1000 * each for each in three), over))
    columns = ("sites", "client", "least ms", "median", "most", "times as fast as SecAgg+")
    title = f"A client of secure aggregation of {given.numbers:,} numbers"
    report("peers-secure-aggregation", title, columns, rows)


if __name__ == "__main__":
    main()
