"""Parameter groups by role, and the optimizer over them."""

from typing import Any, Final, Literal

import torch
from torch import nn

from lightning_moe.config import OptimConfig
from lightning_moe.nn import Experts, Router

Role = Literal["decay", "no_decay", "router", "experts"]
ROLES: Final[tuple[Role, ...]] = ("decay", "no_decay", "router", "experts")


def parameter_groups(module: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups `decay`, `no_decay` (norms, embeddings, biases), `router` and `experts`, without the empty ones.

    Each holds every trainable parameter of its role once, in the module's order, and its role as `name`, which
    `LearningRateMonitor` shows.
    """
    members: dict[Role, list[nn.Parameter]] = {role: [] for role in ROLES}
    seen: set[nn.Parameter] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                members[_role(owner, name)].append(parameter)
    scales = {"router": config.router_lr_scale, "experts": config.expert_lr_scale}
    return [
        {
            "name": role,
            "params": parameters,
            "lr": config.lr * scales.get(role, 1.0),
            "weight_decay": 0.0 if role == "no_decay" else config.weight_decay,
        }
        for role, parameters in members.items()
        if parameters
    ]


def _role(owner: nn.Module, name: str) -> Role:
    is_bias = name == "bias" or name.startswith("b_")
    if is_bias or isinstance(owner, nn.RMSNorm | nn.LayerNorm | nn.Embedding):
        return "no_decay"
    if isinstance(owner, Router):
        return "router"
    return "experts" if isinstance(owner, Experts) else "decay"


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over `parameter_groups`.

    Raises:
        ValueError: if nothing in `module` is trainable.
    """
    groups = parameter_groups(module, config)
    if not groups:
        raise ValueError(
            "no parameter of the module requires a gradient, so there is nothing to optimize"
        )
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    # Lightning 2.6 refuses gradient clipping under mixed precision for an optimizer that says it unscales gradients
    # itself (Lightning issue 21435). Saying it doesn't is always right: a GradScaler then unscales before the step.
    optimizer._step_supports_amp_scaling = False
    return optimizer
