"""Time of a private training step of a generator, compared with the step without privacy and with
Opacus.

A step: the gradients of a batch, clipped per record, the noise, and the optimiser. Opacus per
record: its `GradSampleModule`, which stores every record's gradient. Opacus ghost: its fast
gradient clipping, with two backward passes. Both use our noise.
"""

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from torch import Tensor, nn

from benchmarks.harness.options import described
from benchmarks.harness.results import report
from benchmarks.harness.timing import in_turn, ratio
from fedsurrogate.client_app.methods.dp.record_gradients import NoisyMeans
from fedsurrogate.client_app.methods.dpcvae.training import (
    Trainer,
    exact_gradient,
    private_gradient,
    trainer_of,
)
from fedsurrogate.common.models.generators import fresh_companion, fresh_generator
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum
from fedsurrogate.common.run import parse_run

CLIP, NOISE, RECORDS, CLASSES = 0.1, 2.0, 256, 10
SIZES: dict[str, dict[str, Any]] = {
    "linear, 8 latent (the default under privacy)": {"dpcvae.hidden": 0, "dpcvae.latent": 8},
    "256 hidden, 32 latent": {"dpcvae.hidden": 256, "dpcvae.latent": 32},
}


class Losses(nn.Module):
    """Module for Opacus to wrap: its output is the losses."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.modules_, self._trainer = trainer.modules, trainer

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self._trainer.losses(x, labels, self._trainer.noise(len(labels)))


def noisy(trainer: Trainer, parts: list[Tensor]) -> None:
    flat = torch.cat([part.double().flatten() for part in parts])
    made = BoundedSum("gradients", IntegerSum.of(flat, CLIP), CLIP).noisy(NOISE * CLIP)
    named = dict(trainer.modules.named_parameters())
    pieces = torch.split(made.value / RECORDS, [p.numel() for p in named.values()])
    trainer.step(
        {
            name: piece.reshape(p.shape).float()
            for (name, p), piece in zip(named.items(), pieces, strict=True)
        }
    )


def steps(settings: dict[str, Any], dimension: int) -> dict[str, Callable[[], None]]:
    run = parse_run({"method": "dpcvae"} | settings)
    x, labels = torch.randn(RECORDS, dimension), torch.arange(RECORDS) % CLASSES

    def trainer() -> Trainer:
        shared, companion = (
            fresh_generator(run.settings, run.method.adversarial, CLASSES, dimension),
            fresh_companion(run.settings, run.method.adversarial, CLASSES, dimension),
        )
        return trainer_of(
            shared,
            companion,
            run.settings.dpcvae,
            (2, 9),
            torch.ones(CLASSES),
            True,
            torch.Generator(),
        )

    plain, ours, per_record, ghost = (trainer() for _ in range(4))
    means = NoisyMeans(CLIP, NOISE, RECORDS)
    sampled = GradSampleModule(Losses(per_record), loss_reduction="sum")
    fast = GradSampleModuleFastGradientClipping(
        Losses(ghost), max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum"
    )

    def opacus_per_record() -> None:
        sampled.zero_grad(set_to_none=True)
        sampled(x, labels).sum().backward()
        each: list[Tensor] = [p.grad_sample for p in per_record.modules.parameters()]  # type: ignore[attr-defined]
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in each]).norm(dim=0)
        factors = (CLIP / norms).clamp_max(1.0)
        noisy(per_record, [torch.einsum("n,n...->...", factors, part) for part in each])

    def opacus_ghost() -> None:
        fast.enable_hooks()
        losses = fast(x, labels)
        losses.sum().backward(retain_graph=True)
        factors = fast.get_clipping_coef()
        fast.disable_hooks()
        # Not backward(): after the first call every .grad holds the unclipped sum.
        noisy(
            ghost,
            list(torch.autograd.grad((factors * losses).sum(), list(ghost.modules.parameters()))),
        )
        fast.zero_grad(set_to_none=True)

    return {
        "without privacy": lambda: plain.step(exact_gradient(plain, x, labels)),
        "private": lambda: ours.step(private_gradient(ours, means, x, labels)),
        "Opacus ghost": opacus_ghost,
        "Opacus per record": opacus_per_record,
    }


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--dimension", type=int, default=1280)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    rows = []
    for name, settings in SIZES.items():
        times = in_turn(steps(settings, options.dimension), options.repeats, warm=2)
        for kind, seconds in times.items():
            cost = ratio(seconds, times["without privacy"])
            rows.append((name, kind, 1000 * statistics.median(seconds), cost))
    title = f"A step on {RECORDS} records of dimension {options.dimension}"
    report("dpcvae-step", title, ("generator", "step", "ms", "ratio"), rows)


if __name__ == "__main__":
    main()
