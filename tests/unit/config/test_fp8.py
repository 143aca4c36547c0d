"""Options of the experts in eight bits."""

import pytest

from lightning_moe.config import FP8Config, MoEConfig, from_mapping


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_mode": "ceil"}, "model.moe.fp8.scale_mode='ceil' must be one of rceil, floor"),
        ({"emulate": 1}, "model.moe.fp8.emulate=1 must be true or false"),
        ({"fp8_only": 1}, "model.moe.fp8.fp8_only=1 must be true or false"),
    ],
)
def test_values_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        FP8Config(**options)


@pytest.mark.parametrize("backend", ["auto", "loop", "torch", "grouped_gemm"])
@pytest.mark.parametrize("option", ["emulate", "fp8_only"])
def test_options_without_an_eight_bit_backend_are_refused(backend: str, option: str) -> None:
    message = rf"fp8\.{option}=True has no effect .*fp8_rowwise or mxfp8"
    with pytest.raises(ValueError, match=message):
        MoEConfig(backend=backend, fp8=FP8Config(**{option: True}))


def test_a_scale_mode_of_row_wise_scales_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fp8\.scale_mode='floor' has no effect .*choose mxfp8"):
        MoEConfig(backend="fp8_rowwise", fp8=FP8Config(scale_mode="floor"))


def test_a_mapping_sets_them() -> None:
    options = {"backend": "mxfp8", "fp8": {"scale_mode": "floor", "emulate": True}}
    config = from_mapping(MoEConfig, options, "model.moe")
    assert config.fp8 == FP8Config(scale_mode="floor", emulate=True)
