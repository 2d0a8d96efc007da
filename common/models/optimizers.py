"""The optimisers of torch without its compiler.

`torch.optim` imports torch's compiler (`torch._dynamo`, 900 modules, seconds and 120 MB) when the first
optimiser is made, only to exclude itself from compilation. These are the same optimisers for code that
compiles nothing, with the same steps, bit by bit.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

COMPILER = "torch._dynamo"


class _Uncompiled(torch.optim.Optimizer):
    """Calls torch's methods without what wraps them for the compiler, unless it is loaded anyway."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        _plain(super().add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        _plain(super().zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        state: dict[str, Any] = _plain(super().state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        _plain(super().load_state_dict)(self, state_dict)

    def step(self, closure: Any = None) -> Any:
        """As torch's."""
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return _plain(super().step)(self, closure)


class UncompiledSGD(_Uncompiled, torch.optim.SGD):
    """`torch.optim.SGD`."""


class UncompiledAdam(_Uncompiled, torch.optim.Adam):
    """`torch.optim.Adam`."""


def _plain(method: Any) -> Callable[..., Any]:
    """The function of a bound method, without the compiler's wrappers if that is not loaded."""
    function: Callable[..., Any] = method.__func__
    return function if COMPILER in sys.modules else inspect.unwrap(function)
