"""Finding the MoE layers of a module."""

from torch import nn

from lightning_moe.config import MoEConfig
from lightning_moe.nn import MoE, moe_layers, named_moe_layers


def test_the_moe_layers_of_any_module_come_in_its_order_and_once_each() -> None:
    first, second = (MoE(6, MoEConfig(num_experts=2, hidden_size=3)) for _ in range(2))
    module = nn.ModuleDict({"b": first, "dense": nn.Linear(6, 6), "a": second, "again": first})
    assert named_moe_layers(module) == {"b": first, "a": second}
    assert moe_layers(module) == [first, second]
    assert moe_layers(module["dense"]) == []
