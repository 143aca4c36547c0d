"""The expert backends of a module, settled before training."""

from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_moe.nn import Experts


def settle_backends(module: nn.Module, precision: Precision) -> None:
    """Check that all experts can run in this precision on their device, and say what they run on.

    Raises:
        ValueError: if one can't.
    """
    with precision.forward_context():
        accounts = [
            experts.backend.account(experts.sizes())
            for experts in module.modules()
            if isinstance(experts, Experts)
        ]
    for account in dict.fromkeys(accounts):
        rank_zero_info(account)
