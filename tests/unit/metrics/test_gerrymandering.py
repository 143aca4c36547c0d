"""The alarm tells a balance loss that is low although the load is bad from noise, transients and healthy skew."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_moe.callbacks import ExpertLoadMonitor, GerrymanderingAlarm, LayerHealth
from lightning_moe.metrics.gerrymandering import warning
from lightning_moe.ops.load import balance_inner_product, dead_share, load_max_over_mean
from tests.kit.modules import Scripted
from tests.kit.monitored import fit, resume
from tests.kit.records import routing_record

MANY = 10**7


def _health(loss: float, ratio: float, dead: float = 0.0, copies: int = MANY) -> LayerHealth:
    return LayerHealth(
        balance_loss=loss, max_over_mean=ratio, dead_share=dead, num_experts=64, num_copies=copies
    )


def _alarms(series: Iterable[LayerHealth]) -> list[int]:
    """The entries at which an episode begins, for one layer."""
    alarm = GerrymanderingAlarm(1)
    return [number for number, health in enumerate(series) if alarm.begins([health])]


def _path(start: float, end: float, num_entries: int) -> list[float]:
    return torch.linspace(start, end, num_entries).tolist()


def test_a_healthy_run_with_noise_is_silent(generator: torch.Generator) -> None:
    noise = torch.randn(400, 2, generator=generator)
    # An even load wobbles, and the loss with it: 1 plus what both have in common.
    series = [_health(1 + 0.003 * a, 1.15 + abs(0.04 * b)) for a, b in noise.tolist()]
    assert _alarms(series) == []


def test_an_uneven_load_that_the_loss_complains_of_is_silent() -> None:
    assert _alarms(_health(1.4, 6.0, 0.3) for _ in range(20)) == []


def test_an_early_transient_is_silent() -> None:
    """Even scores at first, then experts specialise faster than the loss corrects, then it does."""
    loss = [*_path(1.0, 1.9, 10), *_path(1.9, 1.01, 30), *[1.005] * 20]
    ratio = [*_path(1.4, 7.0, 10), *_path(7.0, 1.2, 30), *[1.15] * 20]
    dead = [*_path(0.0, 0.2, 10), *_path(0.2, 0.0, 30), *[0.0] * 20]
    assert _alarms(map(_health, loss, ratio, dead)) == []


def test_an_even_load_is_silent_whatever_the_loss() -> None:
    """As where a expert bias evens out experts of unlike score."""
    assert _alarms(_health(0.9, 1.1) for _ in range(20)) == []


def test_few_tokens_are_no_evidence() -> None:
    # 640 copies of 64 experts: chance alone makes the busiest expert twice as busy as the mean.
    assert _alarms(_health(0.97, 2.2, 0.05, copies=640) for _ in range(20)) == []
    assert _alarms(_health(0.97, 2.2, copies=MANY) for _ in range(20)) == [2]


def test_a_run_that_went_wrong_as_published_is_found_in_its_first_half() -> None:
    """Loss per layer 0.997 to 0.879 while the worst layer goes from 2.75 to 6.32."""
    series = map(_health, _path(0.997, 0.879, 60), _path(2.75, 6.32, 60))
    (begun,) = _alarms(series)
    assert begun < 20


def test_idle_experts_are_an_uneven_load() -> None:
    assert _alarms(_health(0.95, 1.2, 1 / 64) for _ in range(5)) == [2]


def test_a_loss_above_one_that_falls_while_the_load_gets_worse_is_found() -> None:
    worse = map(_health, _path(1.3, 1.1, 20), _path(1.5, 3.0, 20))
    (begun,) = _alarms([*[_health(1.3, 1.5)] * 5, *worse])
    # A quarter worse than 1.5 from the fifth entry on, three in a row.
    assert begun == 5 + 5 + 2
    more_dead = map(_health, _path(1.3, 1.1, 20), [1.5] * 20, _path(0.0, 0.2, 20))
    assert len(_alarms([*[_health(1.3, 1.5)] * 5, *more_dead])) == 1


@pytest.mark.parametrize(("loss", "ratio"), [(1.3, 3.0), (1.1, 1.6)])
def test_either_alone_is_silent(loss: float, ratio: float) -> None:
    later = map(_health, _path(1.3, loss, 20), _path(1.5, ratio, 20))
    assert _alarms([*[_health(1.3, 1.5)] * 5, *later]) == []


def test_two_bad_entries_in_a_row_are_not_enough() -> None:
    bad, good = _health(0.9, 3.0), _health(1.0, 1.1)
    assert _alarms([bad, bad, good] * 10) == []
    assert _alarms([good, bad, bad, bad, good]) == [3]


def test_one_warning_per_episode_though_the_loss_crosses_the_bound_again_and_again() -> None:
    at_the_bound = [_health(0.978 + 0.003 * (number % 2), 3.0) for number in range(30)]
    assert _alarms([_health(0.97, 3.0)] * 3 + at_the_bound) == [2]


def test_a_second_episode_warns_again() -> None:
    bad, good = [_health(0.9, 3.0)] * 5, [_health(1.0, 1.1)] * 5
    assert _alarms([*good, *bad, *good, *bad]) == [7, 17]


def test_an_episode_lasts_from_the_first_layer_to_the_last() -> None:
    alarm = GerrymanderingAlarm(3)
    bad, good = _health(0.9, 3.0), _health(1.0, 1.1)
    stages = [
        ([good, bad, good], [1]),
        ([good, bad, bad], [1, 2]),
        ([good, good, bad], [2]),
        ([bad, good, bad], [0, 2]),
        ([good, good, good], []),
    ]
    begun = []
    for entry, suspicious in stages:
        begun += [alarm.begins(entry) for _ in range(3)]
        assert alarm.suspicious == suspicious
    assert [number for number, begins in enumerate(begun) if begins] == [2]


def test_an_entry_without_tokens_is_passed_over() -> None:
    empty = _health(math.nan, 1.0, copies=0)
    assert _alarms([_health(0.9, 3.0), empty, _health(0.9, 3.0), _health(0.9, 3.0)]) == [3]


def test_a_layer_that_is_not_judged_is_never_suspicious() -> None:
    alarm = GerrymanderingAlarm(2)
    begun = [alarm.begins([None, _health(0.9, 3.0)]) for _ in range(3)]
    assert (begun, alarm.suspicious) == ([False, False, True], [1])


def test_the_warning_names_layers_numbers_and_what_to_do() -> None:
    entry = [_health(0.9, 2.0 + number, 0.25) for number in range(7)]
    text = warning(120, [0, 2, 3, 4, 5, 6], entry)
    assert text.startswith("token gerrymandering at step 120: ")
    assert "layer 6: balance loss 0.900, busiest expert 8.00 times the mean, 16 of 64 idle" in text
    assert "layer 3" in text
    assert "layer 2" not in text
    assert "and 2 more" in text
    assert "model.moe.router.lb_loss_weight" in text
    assert "model.moe.router.bias_gamma" in text


def _entry(logits_TE: Tensor) -> LayerHealth:
    num_tokens, num_experts = logits_TE.shape
    counts_E = logits_TE.argmax(dim=-1).bincount(minlength=num_experts)
    score_sums_E = logits_TE.softmax(dim=-1).sum(dim=0)
    return LayerHealth(
        balance_loss=1 + balance_inner_product(counts_E, score_sums_E).item(),
        max_over_mean=load_max_over_mean(counts_E).item(),
        dead_share=dead_share(counts_E).item(),
        num_experts=num_experts,
        num_copies=num_tokens,
    )


def _descend(generator: torch.Generator, sharpness: float | None) -> list[LayerHealth]:
    """Gradient descent on the top-1 balance loss by the logits of 4096 tokens and 8 experts alone.

    With `sharpness`, the gradient also sees how near a token's choice is, as if counts were those of so much sharper
    scores; without, counts are constants, as in training.
    """
    logits_TE = torch.randn(4096, 8, generator=generator).requires_grad_()
    entries = []
    for _ in range(80):
        entries.append(_entry(logits_TE.detach()))
        if sharpness is None:
            counts_E = logits_TE.argmax(dim=-1).bincount(minlength=8)
            shares_E = counts_E / counts_E.sum()
        else:
            shares_E = (logits_TE * sharpness).softmax(dim=-1).mean(dim=0)
        loss = 8 * (shares_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum()
        (gradient,) = torch.autograd.grad(loss, logits_TE)
        logits_TE = (logits_TE - 0.3 * 4096 * gradient).detach().requires_grad_()
    return entries


def test_descent_that_learns_to_win_by_a_hair_sets_off_the_alarm(
    generator: torch.Generator,
) -> None:
    entries = _descend(generator, sharpness=5.0)
    first, last = entries[0], entries[-1]
    assert first.balance_loss > 1
    assert last.balance_loss < 0.95
    assert first.max_over_mean < 1.2
    assert last.max_over_mean > 1.4
    assert len(_alarms(entries)) == 1


def test_descent_as_in_training_is_silent(generator: torch.Generator) -> None:
    entries = _descend(generator, sharpness=None)
    assert entries[-1].max_over_mean < 1.2
    assert _alarms(entries) == []


# ---- in the load monitor ----------------------------------------------------------------------------------------

# The busiest experts are those with least score.
GERRYMANDERED = [
    routing_record([5000, 5000, 0, 0], scores=[1000.0, 1000.0, 1500.0, 1500.0], top_k=2)
] * 6


def test_gerrymandering_warns_once_and_is_logged(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=1, write_files=False)
    module = Scripted(GERRYMANDERED, bias_gamma=None)
    with pytest.warns(UserWarning, match="token gerrymandering at step 2: .*layer 0") as caught:
        steps = fit(tmp_path, module, 6, callbacks=[monitor]).steps
    assert sum("gerrymandering" in str(warning.message) for warning in caught) == 1
    suspected = [step["train/gerrymandered_layers"] for step in steps]
    assert suspected == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_selection_bias_without_a_loss_is_not_suspected(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=1, write_files=False)
    steps = fit(tmp_path, Scripted(GERRYMANDERED, bias_gamma=1e-3), 6, callbacks=[monitor]).steps
    assert steps[-1]["train/gerrymandered_layers"] == 0.0


def test_the_alarm_can_be_turned_off(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=1, alarm=False, write_files=False)
    steps = fit(tmp_path, Scripted(GERRYMANDERED, bias_gamma=None), 6, callbacks=[monitor]).steps
    assert "train/gerrymandered_layers" not in steps[-1]


def test_the_alarm_remembers_what_it_saw_before_a_resume(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="token gerrymandering at step 2"):
        resume(tmp_path, Scripted(GERRYMANDERED, bias_gamma=None), None, 3)
    # Another warning would be an error.
    resume(tmp_path, Scripted(GERRYMANDERED, bias_gamma=None), tmp_path / "last.ckpt", 6)
