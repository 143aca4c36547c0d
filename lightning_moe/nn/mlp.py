"""A dense feed-forward network: the shared expert, and the dense layers of a mixed model."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from lightning_moe.ops.activations import activation_function


class MLP(nn.Module):
    """Up (and gate) projection, activation, down projection, without biases.

    Attributes:
        up_gate: Linear of weight (P, D); rows [0, F) make `up`, [F, 2F) `gate`.
        down: Linear of weight (D, F).
    """

    def __init__(
        self, d_model: int, hidden_size: int, activation: Literal["swiglu", "relu2"] = "swiglu"
    ) -> None:
        super().__init__()
        self.up_gate = nn.Linear(
            d_model, hidden_size * (1 if activation == "relu2" else 2), bias=False
        )
        self.down = nn.Linear(hidden_size, d_model, bias=False)
        self.activation = activation_function(activation)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Output of each token."""
        y_TD: Tensor = self.down(self.activation(self.up_gate(x.flatten(0, -2))))
        return y_TD.view(x.shape)
