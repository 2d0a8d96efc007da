"""DP-CVAE and DP-CGAN in secure sums: the coordinator sees the sums of class statistics and of
weighted updates.
"""

from __future__ import annotations

from fedsurrogate.strategies.dpcvae.shared_generator import SharedGenerator
from fedsurrogate.strategies.secure_sum.rounds import SecureRounds


class SummedGenerators(SharedGenerator, SecureRounds):
    """Rounds of secure sums. In the first, of class sizes and sums; in the others, of the
    generator's weighted updates.
    """
