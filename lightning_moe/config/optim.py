"""How weights are updated: the optimizer's numbers and the learning-rate schedule."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    BELOW_ONE,
    FRACTION,
    NON_NEGATIVE,
    check_choices,
    check_floats,
    check_instances,
    check_ints,
    given,
)

Schedule = Literal["constant", "cosine", "wsd"]
ScheduleUnit = Literal["steps", "tokens"]
DecayShape = Literal["linear", "1-sqrt"]

_NUM_MOMENTS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its schedule: warm-up, then `constant`, `cosine`, or `wsd` (stable, then decay).

    Attributes:
        lr: peak learning rate, at least 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, at least 0.
        weight_decay: decoupled decay, at least 0.
        router_lr_scale: factor on `lr` for routers, at least 0.
        expert_lr_scale: factor on `lr` for routed experts, at least 0.
        schedule: shape of the learning rate after the warm-up.
        unit: what `warmup`, `total` and `decay` count: optimizer steps or tokens.
        warmup: length of the linear warm-up, in `unit`.
        total: where the schedule ends, in `unit`; None takes the Trainer's number of steps.
        decay: length of the decay that ends at `total`, in `unit`; only for `wsd`, which needs it.
        decay_shape: `linear`, or one minus the square root of progress; only for `wsd`.
        min_lr_ratio: learning rate at the end over `lr`, in [0, 1]; only for `cosine` and `wsd`.
        max_skipped_steps: steps in a row with non-finite gradients that are skipped before training
            stops with an error.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    router_lr_scale: float = 1.0
    expert_lr_scale: float = 1.0
    schedule: Schedule = "constant"
    unit: ScheduleUnit = "steps"
    warmup: int = 0
    total: int | None = None
    decay: int = 0
    decay_shape: DecayShape = "linear"
    min_lr_ratio: float = 0.0
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        """Check every option, then that each has an effect and that the phases fit."""
        self._check_values()
        self._check_effect()
        self._check_phases()

    def _check_values(self) -> None:
        check_floats(
            "optim",
            NON_NEGATIVE,
            lr=self.lr,
            eps=self.eps,
            weight_decay=self.weight_decay,
            router_lr_scale=self.router_lr_scale,
            expert_lr_scale=self.expert_lr_scale,
        )
        check_instances("optim", tuple, betas=self.betas)
        if len(self.betas) != _NUM_MOMENTS:
            raise ValueError(f"optim.betas={self.betas} must be two numbers")
        check_floats(
            "optim", BELOW_ONE, **{f"betas[{i}]": beta for i, beta in enumerate(self.betas)}
        )
        check_choices("optim", get_args(Schedule), schedule=self.schedule)
        check_choices("optim", get_args(ScheduleUnit), unit=self.unit)
        check_choices("optim", get_args(DecayShape), decay_shape=self.decay_shape)
        check_ints(
            "optim",
            NON_NEGATIVE,
            warmup=self.warmup,
            decay=self.decay,
            max_skipped_steps=self.max_skipped_steps,
        )
        check_ints("optim", AT_LEAST_ONE, **given(total=self.total))
        check_floats("optim", FRACTION, min_lr_ratio=self.min_lr_ratio)

    def _check_effect(self) -> None:
        rules = (
            ("decay", self.decay, 0, ("wsd",)),
            ("decay_shape", self.decay_shape, "linear", ("wsd",)),
            ("min_lr_ratio", self.min_lr_ratio, 0.0, ("cosine", "wsd")),
            ("total", self.total, None, ("cosine", "wsd")),
        )
        for name, value, default, schedules in rules:
            if value != default and self.schedule not in schedules:
                raise ValueError(
                    f"optim.{name}={value} has no effect with optim.schedule={self.schedule}; "
                    f"unset it or choose schedule {' or '.join(schedules)}"
                )

    def _check_phases(self) -> None:
        if self.schedule == "constant":
            return
        if self.schedule == "wsd" and self.decay == 0:
            raise ValueError(
                "optim.decay=0 leaves optim.schedule=wsd without a decay; "
                "set optim.decay, or choose schedule constant"
            )
        if self.total is None:
            if self.unit == "tokens":
                raise ValueError(
                    f"optim.total=None with optim.schedule={self.schedule} and optim.unit=tokens: "
                    f"the Trainer knows steps only; set optim.total in tokens"
                )
            return
        if self.warmup + self.decay > self.total:
            raise ValueError(
                f"optim.warmup={self.warmup} and optim.decay={self.decay} are longer together than "
                f"optim.total={self.total}; shorten them or raise total"
            )
