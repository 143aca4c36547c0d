"""The routed experts of a module, and their backends, settled before training."""

from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_moe.nn import Experts


def experts_of(module: nn.Module) -> list[Experts]:
    """Those of all its MoE layers, in order."""
    return [part for part in module.modules() if isinstance(part, Experts)]


def settle_backends(module: nn.Module, precision: Precision) -> None:
    """Check that all experts can run in this precision on their device, and say what they run on.

    Raises:
        ValueError: if one can't.
    """
    with precision.forward_context():
        accounts = [experts.backend.account(experts.sizes()) for experts in experts_of(module)]
    for account in dict.fromkeys(accounts):
        rank_zero_info(account)
