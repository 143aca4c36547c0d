"""The backends of a module's experts, settled before training."""

from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_moe.nn import routed_experts


def settle_backends(module: nn.Module, precision: Precision) -> None:
    """Check that all experts can run in this precision on their device, and say what they run on.

    Raises:
        ValueError: if one can't.
    """
    with precision.forward_context():
        accounts = [experts.backend.account(experts.sizes()) for experts in routed_experts(module)]
    for account in dict.fromkeys(accounts):
        rank_zero_info(account)
