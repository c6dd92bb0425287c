"""Activated batch norms as modules, with the constructors and the state_dicts of the package inplace_abn.

`ABN` is torch's norm and activation in one module, `InPlaceABN` keeps one buffer where that keeps two, `InPlaceABNSync`
takes its statistics over a process group.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from takeback.nn.functional import (
    Scale,
    activated_norm,
    activation_of,
    inverse_of,
    plain_activation,
    prepare_for_graphs,
)
from takeback.nn.invert import Weights
from takeback.nn.owner import Copies
from takeback.nn.sync import group_of


class ABN(nn.Module):
    """Batch norm and activation, computed by torch: what the in-place modules are checked against, and revert to.

    Args:
        num_features: channels C of an N × C or N × C × S1 × ... × Sn input.
        momentum: of the running statistics; None for their plain average over all batches.
        activation: "identity", "leaky_relu", "elu", "relu" or "silu".
        activation_param: leaky_relu's slope below zero, elu's alpha.
    """

    _version = 2
    num_batches_tracked: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(activation)
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.activation = activation
        self.activation_param = activation_param
        for name in ("weight", "bias"):
            value = torch.empty(num_features, device=device, dtype=dtype) if affine else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        for name in ("running_mean", "running_var"):
            value = torch.empty(num_features, device=device, dtype=dtype) if track_running_stats else None
            self.register_buffer(name, value)
        counter = torch.tensor(0, dtype=torch.long, device=device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", counter)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        if self.running_mean is not None:
            self.running_mean.zero_()
        if self.running_var is not None:
            self.running_var.fill_(1)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Weights 1, biases 0, no batches seen."""
        self.reset_running_stats()
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """act(batch_norm(x)), as torch computes it."""
        self._check(x)
        running_mean, running_var, training, momentum = self._statistics()
        z = F.batch_norm(x, running_mean, running_var, self.weight, self.bias, training, momentum, self.eps)
        return plain_activation(z, activation_of(self.activation), self.activation_param, inplace=True)

    def _check(self, x: Tensor) -> None:
        if torch.jit.is_tracing():
            return  # the shape's check would become part of what is exported
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__}({self.num_features}) expects N × {self.num_features} or N × "
                f"{self.num_features} × S1 × ... × Sn, got a tensor of shape {tuple(x.shape)}"
            )

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, bool, float]:
        """Running mean and variance to read or move, whether the batch's own are used, and the momentum."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        training = self.training or (self.running_mean is None and self.running_var is None)
        if self.training and not self.track_running_stats:
            return None, None, training, momentum
        return self.running_mean, self.running_var, training, momentum

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2 and self.track_running_stats:  # as in torch, before there was a counter
            state_dict.setdefault(prefix + "num_batches_tracked", torch.tensor(0, dtype=torch.long))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def extra_repr(self) -> str:
        shown = self.activation
        if self.activation in ("leaky_relu", "elu"):
            shown += f"[{self.activation_param}]"
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, activation={shown}"
        )


class InPlaceABN(ABN):
    """An activated batch norm that keeps one buffer for backward, and whose backward writes its result onto it.

    With identity, leaky_relu and elu (not in half precision) that buffer is the output, which the next layer keeps
    anyway: the input is overwritten by it, and backward inverts the activation. relu and silu lose what backward needs:
    they keep the input and compute the norm again (`backward_from` says which). The input is given up by calling this,
    as with `ReLU(inplace=True)`. `copies` counts, by reason, the buffers that could not be overwritten.

    Args:
        scale: "weight" multiplies by the weight, signed, as BatchNorm does, so its weights load exactly; "absolute" by
            |weight| + eps, as the package inplace_abn does: choose it for that package's checkpoints.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        scale: Literal["weight", "absolute"] = "weight",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            activation,
            activation_param,
            device=device,
            dtype=dtype,
        )
        self.scale = Scale(scale)
        self.copies = Copies()
        self._weights = Weights()

    @property
    def backward_from(self) -> Literal["output", "input"]:
        """What backward starts from in float32, with weights that can be inverted."""
        return "output" if inverse_of(self.activation, self.activation_param, torch.float32) is None else "input"

    def forward(self, x: Tensor) -> Tensor:
        """act(batch_norm(x)); x is given up."""
        return self._normalised(x, None)

    def _normalised(self, x: Tensor, group: Any) -> Tensor:
        self._check(x)
        running_mean, running_var, training, momentum = self._statistics()
        return activated_norm(
            x,
            self.weight,
            self.bias,
            running_mean,
            running_var,
            training=training,
            momentum=momentum,
            eps=self.eps,
            activation=self.activation,
            activation_param=self.activation_param,
            scale=self.scale,
            group=group,
            weights=self._weights,
            copies=self.copies,
        )

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica._weights = Weights()  # threads and devices of their own
        return replica

    def _load_from_state_dict(self, *state: Any) -> None:
        super()._load_from_state_dict(*state)
        self._weights.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weights": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_weights": Weights()})

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backward from {self.backward_from}" + (
            ", scale=absolute" if self.scale is Scale.ABSOLUTE else ""
        )


class InPlaceABNSync(InPlaceABN):
    """An `InPlaceABN` whose statistics are those of all ranks' batches together, which may differ in size.

    Args:
        group: the process group; None for all processes. In training it must exist: nothing is left unsynchronised.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        group: Any = None,
        *,
        scale: Literal["weight", "absolute"] = "weight",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            activation,
            activation_param,
            scale=scale,
            device=device,
            dtype=dtype,
        )
        self.group = group
        prepare_for_graphs()

    def set_group(self, group: Any) -> None:
        """Synchronise with another group from the next forward on."""
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """act(batch_norm(x)) over the group's batches; x is given up."""
        needs_group = self.training or self.running_mean is None
        return self._normalised(x, group_of(self.group) if needs_group else None)
