"""Traces made by hand: where they part, near-ties and real differences, and the exit code."""

from pathlib import Path

import numpy as np
import pytest

from lightning_moe.cli import main
from lightning_moe.metrics.route_comparison import compare, read_trace
from lightning_moe.metrics.token_routes import RouteKey, Routes, write_routes

TIE = 1e-3


def _routes(
    ids: list[list[int]],
    margins: list[float] | None = None,
    *,
    valid: list[bool] | None = None,
    weight: float = 0.5,
) -> Routes:
    return Routes(
        ids=np.array(ids, dtype=np.uint8),
        weights=np.full((len(ids), len(ids[0])), weight, dtype=np.float32),
        margins=np.array(margins or [0.5] * len(ids)),
        valid=np.array(valid or [True] * len(ids)),
    )


BASE = {
    RouteKey(step, micro_batch, layer): [_routes([[0, 1], [2, 3], [4, 5]])]
    for step in (2, 7)
    for micro_batch in (0, 1)
    for layer in (0, 3)
}


def test_equal_traces_are_equal() -> None:
    difference = compare(BASE, dict(BASE), tie=TIE)
    assert difference.is_equal
    assert difference.first is None
    assert [layer.layer for layer in difference.layers] == [0, 3]
    # Two steps, two micro-batches, three tokens.
    assert [layer.num_tokens for layer in difference.layers] == [12, 12]
    assert difference.conclusion() == "Every token took the same route with the same weights."


def test_the_first_place_counts_by_step_then_micro_batch_then_layer_then_token() -> None:
    other = BASE | {
        RouteKey(7, 0, 0): [_routes([[1, 6], [2, 3], [4, 5]])],
        RouteKey(2, 1, 3): [_routes([[0, 1], [2, 6], [7, 5]], [0.5, 0.25, 0.125], weight=0.75)],
    }
    difference = compare(BASE, other, tie=TIE)
    first = difference.first
    assert first is not None
    assert (first.key, first.rank, first.token) == (RouteKey(2, 1, 3), 0, 1)
    assert first.ids == ([2, 3], [2, 6])
    assert first.weights == ([0.5, 0.5], [0.75, 0.75])
    assert first.margins == (0.5, 0.25)
    assert (first.num_tokens, first.num_near_ties, first.equal_before) == (2, 0, 3)
    assert [layer.num_other for layer in difference.layers] == [1, 2]
    assert [layer.largest_margin for layer in difference.layers] == [0.5, 0.5]
    assert not difference.is_equal


def test_near_ties_are_margins_of_at_most_the_tie_in_both_traces() -> None:
    margins = [TIE, 2 * TIE, TIE]
    one = BASE | {RouteKey(2, 0, 0): [_routes([[0, 1], [2, 3], [4, 5]], [TIE, TIE, 2 * TIE])]}
    two = BASE | {RouteKey(2, 0, 0): [_routes([[0, 6], [2, 6], [4, 6]], margins)]}
    difference = compare(one, two, tie=TIE)
    assert difference.layers[0].num_other == 3
    assert difference.layers[0].num_near_ties == 1
    assert difference.layers[0].largest_margin == 2 * TIE
    text = difference.conclusion()
    assert text.startswith("More than rounding: ")
    assert "2 of 3 tokens" in text
    assert "first place that was traced" in text


def test_a_first_place_of_near_ties_alone_is_rounding_whatever_follows() -> None:
    near = [1e-7, 0.5, 0.5]
    one = BASE | {RouteKey(2, 0, 3): [_routes([[0, 1], [2, 3], [4, 5]], near)]}
    two = BASE | {
        RouteKey(2, 0, 3): [_routes([[0, 6], [2, 3], [4, 5]], near)],
        RouteKey(2, 1, 0): [_routes([[7, 6], [5, 3], [4, 1]])],
    }
    text = compare(one, two, tie=TIE).conclusion()
    assert text.startswith("Rounding decided: ")
    assert "all 1 tokens" in text


def test_places_that_agree_before_a_real_difference_are_named() -> None:
    two = BASE | {RouteKey(7, 0, 0): [_routes([[7, 6], [2, 3], [4, 5]])]}
    assert "The 4 places before it agree" in compare(BASE, two, tie=TIE).conclusion()


def test_another_order_of_the_same_experts_is_told_apart() -> None:
    two = BASE | {RouteKey(2, 0, 0): [_routes([[1, 0], [2, 3], [4, 5]])]}
    difference = compare(BASE, two, tie=TIE)
    assert difference.first is None
    assert [layer.num_reordered for layer in difference.layers] == [1, 0]
    assert not difference.is_equal
    assert "another order" in difference.conclusion()


def test_weights_alone_make_no_difference_of_routes_but_are_told() -> None:
    two = BASE | {RouteKey(2, 0, 0): [_routes([[0, 1], [2, 3], [4, 5]], weight=0.625)]}
    difference = compare(BASE, two, tie=TIE)
    assert difference.is_equal
    assert "weights differ by up to 0.125" in difference.conclusion()


def test_padding_is_not_compared() -> None:
    valid = [True, True, False]
    one = {RouteKey(0, 0, 0): [_routes([[0], [1], [2]], valid=valid)]}
    two = {RouteKey(0, 0, 0): [_routes([[0], [1], [3]], valid=valid)]}
    difference = compare(one, two, tie=TIE)
    assert difference.is_equal
    assert difference.layers[0].num_tokens == 2


def test_places_of_one_trace_only_are_a_difference() -> None:
    fewer = {key: ranks for key, ranks in BASE.items() if key.step == 2}
    difference = compare(fewer, BASE, tie=TIE)
    assert difference.only_first == []
    assert difference.only_second == [key for key in BASE if key.step == 7]
    assert not difference.is_equal


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({RouteKey(5, 0, 0): BASE[RouteKey(2, 0, 0)]}, r"steps \[2, 7\] of layers \[0, 3\] and st"),
        (BASE | {RouteKey(2, 0, 0): [_routes([[0, 1]])]}, "3 tokens with 2 experts each in one"),
        (
            BASE
            | {RouteKey(2, 0, 0): [_routes([[0, 1], [2, 3], [4, 5]], valid=[True, True, False])]},
            "the runs had other data",
        ),
        ({key: 2 * ranks for key, ranks in BASE.items()}, "one trace comes from 1 ranks"),
    ],
)
def test_traces_that_cannot_be_compared_are_refused(
    second: dict[RouteKey, list[Routes]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(BASE, second, tie=TIE)


def _write(folder: Path, trace: dict[RouteKey, list[Routes]]) -> Path:
    for rank in range(len(next(iter(trace.values())))):
        ranks = {key: routes[rank] for key, routes in trace.items()}
        write_routes(folder / f"routes-rank{rank}.npz", ranks)
    return folder


def test_files_give_back_what_was_written_on_every_rank(tmp_path: Path) -> None:
    trace = {
        RouteKey(10, 0, 0): [_routes([[0, 1]], [0.25]), _routes([[2, 3]], [0.75])],
        RouteKey(9, 1, 0): [_routes([[4, 5]], weight=0.25), _routes([[6, 7]], valid=[False])],
    }
    found = read_trace(_write(tmp_path, trace))
    assert list(found) == [RouteKey(9, 1, 0), RouteKey(10, 0, 0)]
    for key, ranks in trace.items():
        for ours, theirs in zip(found[key], ranks, strict=True):
            for field in ("ids", "weights", "margins", "valid"):
                np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "routes-rank0.npz",
        "routes-rank1.npz",
    ]


def test_the_command_is_silent_about_nothing_and_exits_as_diff_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = _write(tmp_path / "one", BASE)
    two = _write(tmp_path / "two", BASE | {RouteKey(2, 1, 3): [_routes([[0, 1], [2, 6], [4, 5]])]})
    assert main(["routes-diff", str(one), str(one)]) == 0
    assert "Every token took the same route" in capsys.readouterr().out
    assert main(["routes-diff", str(one), str(two / "routes-rank0.npz")]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "first difference: step 2, micro-batch 1, layer 3, rank 0, token 1 A: experts [2, 3], weights 0.5, 0.5, "
        "margin 0.5 B: experts [2, 6], weights 0.5, 0.5, margin 0.5"
    ) in text
    assert "1 (8.33 %)" in text
    assert "More than rounding" in text
    assert main(["routes-diff", str(one), str(two), "--tie", "0.5"]) == 1
    assert "Rounding decided" in capsys.readouterr().out
    fewer = _write(tmp_path / "fewer", {key: r for key, r in BASE.items() if key.step == 2})
    assert main(["routes-diff", str(one), str(fewer)]) == 1
    assert "only in A: step 7, micro-batch 0, layer 0, and 3 more" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", b"something else"])
def test_a_file_that_is_missing_or_damaged_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    one, broken = _write(tmp_path / "one", BASE), tmp_path / "two.npz"
    if content is not None:
        broken.write_bytes(content)
    assert main(["routes-diff", str(one), str(broken)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {broken} ")
    assert "Traceback" not in text


def test_a_folder_without_traces_or_without_those_of_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no routes-rank0\.npz"):
        read_trace(tmp_path)
    folder = _write(tmp_path, {key: 3 * ranks for key, ranks in BASE.items()})
    (folder / "routes-rank1.npz").unlink()
    with pytest.raises(FileNotFoundError, match="lacks the file of a rank"):
        read_trace(folder)


def test_an_array_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", **{"weights/0/0/0": np.zeros(3)})
    with pytest.raises(ValueError, match="can't be read as routes"):
        read_trace(tmp_path / "other.npz")
    np.savez(tmp_path / "other.npz", anything=np.zeros(3))
    with pytest.raises(ValueError, match="can't be read as routes"):
        read_trace(tmp_path / "other.npz")


@pytest.mark.parametrize("tie", ["-1", "nan", "inf"])
def test_a_margin_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tie: str
) -> None:
    one = str(_write(tmp_path / "one", BASE))
    with pytest.raises(SystemExit) as stop:
        main(["routes-diff", one, one, "--tie", tie])
    assert stop.value.code == 2
    assert f"argument --tie: {tie} must be finite and at least 0" in capsys.readouterr().err
