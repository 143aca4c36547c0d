"""Compiled blocks train like others: one process computes all facts, since a first compilation takes seconds."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts() -> Facts:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.compile_facts"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_losses_records_and_gradients_of_compiled_blocks_are_the_same(facts: Facts) -> None:
    apart = facts["one"]["apart"]
    assert set(apart) == {
        *(f"float32, {way}" for way in ("none", "block", "moe", "attention")),
        *(f"float32, {linears}" for linears in ("fp8_rowwise", "mxfp8")),
        "bfloat16, moe",
        "float64, moe",
    }
    assert max(difference for way, difference in apart.items() if "float64" not in way) < 1e-6
    assert apart["float64, moe"] < 1e-14


def test_blocks_are_whole_graphs_but_for_a_matmul_that_loops(facts: Facts) -> None:
    breaks = facts["one"]["breaks"]
    assert breaks.pop("float64, moe") > 0
    assert set(breaks.values()) == {0}


def test_recomputing_a_compiled_block_chooses_no_experts_again(facts: Facts) -> None:
    assert facts["one"]["choices"] == {"none": 2, "block": 2, "moe": 2, "attention": 2}


def test_other_lengths_make_few_further_graphs(facts: Facts) -> None:
    # Attention, dense and MoE half: for the first length, for any length, and for one token.
    assert facts["one"]["graphs"] <= 9


def test_compiling_shows_neither_in_state_dicts_nor_in_copies(facts: Facts) -> None:
    assert facts["one"]["same_keys"]
    assert facts["one"]["copies_apart"] < 1e-6


def test_compiled_code_may_be_the_first_to_read_weights(facts: Facts) -> None:
    assert facts["one"]["first_read_apart"] < 1e-6


def test_inductor_computes_the_same(facts: Facts) -> None:
    assert facts["one"]["inductor_apart"] < 1e-5


def test_compiled_ranks_compute_the_same_and_static_dispatch_breaks_no_graph(facts: Facts) -> None:
    for rank in facts["ranks"]:
        assert max(rank["apart"].values()) < 1e-5
        assert rank["breaks"]["static, none"] == rank["breaks"]["static, moe"] == 0
        assert rank["breaks"]["all_to_all, none"] > 0


def test_compiled_blocks_look_ahead_and_resume_in_the_middle_of_an_epoch_on_ranks(
    facts: Facts,
) -> None:
    for rank in facts["exact"]:
        assert rank["resumed_apart"] == {"none": 0.0, "aot_eager": 0.0}
        # AdamW makes full steps of gradients that are hardly more than rounding: 2e-4 were seen.
        assert rank["compiled_apart"] < 1e-3


def test_the_time_of_the_first_step_is_told_once(facts: Facts) -> None:
    (line,) = facts["logged"]
    told = re.fullmatch(
        r"model\.compile=aot_eager: the first micro-batch took (\d+\.\d) s, compiling included",
        line,
    )
    assert told is not None
    # No step of this tiny model takes that long by itself.
    assert float(told[1]) > 0.3
