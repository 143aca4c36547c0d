"""What can be compiled, and what stays out of graphs."""

import pytest
import torch
from torch._inductor import config as inductor

from lightning_moe.ops.compiled import compile_refusal, outside_of_graphs

CPU = torch.device("cpu")


def test_only_inductor_on_a_cpu_needs_a_cpp_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    reason = compile_refusal("inductor", CPU)
    assert reason is not None
    assert "needs a C++ compiler" in reason
    assert compile_refusal("inductor", torch.device("cuda")) is None
    assert compile_refusal("aot_eager", CPU) is None
    assert compile_refusal("none", CPU) is None


def test_a_function_outside_of_graphs_is_called_as_it_is() -> None:
    seen = []

    @outside_of_graphs
    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: note(x * 2) * 3, backend="eager")
    for value in (1.0, 2.0):
        assert compiled(torch.tensor(value)).item() == (2 * value + 1) * 3
    assert seen == [False, False]
