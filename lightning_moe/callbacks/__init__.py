"""Lightning callbacks; all but `StartFrom` and `ModelTable` work with any module that inherits `StepHooks`."""

from lightning_moe.callbacks.bias_correction import RouterBiasCorrection
from lightning_moe.callbacks.gradient_guard import NonFiniteGuard
from lightning_moe.callbacks.load_monitor import ExpertLoadMonitor
from lightning_moe.callbacks.loss_curve import LossCurve
from lightning_moe.callbacks.model_table import ModelTable
from lightning_moe.callbacks.routing_trace import RoutingTrace
from lightning_moe.callbacks.start_from import StartFrom
from lightning_moe.metrics.gerrymandering import GerrymanderingAlarm, LayerHealth
from lightning_moe.metrics.routing_history import read_history

__all__ = [
    "ExpertLoadMonitor",
    "GerrymanderingAlarm",
    "LayerHealth",
    "LossCurve",
    "ModelTable",
    "NonFiniteGuard",
    "RouterBiasCorrection",
    "RoutingTrace",
    "StartFrom",
    "read_history",
]
