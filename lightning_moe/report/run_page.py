"""The sections about one run."""

from collections.abc import Sequence
from html import escape

import numpy as np
import yaml

from lightning_moe.metrics.gerrymandering import can_be_fooled, episodes, layer_health
from lightning_moe.metrics.routing_history import LayerRouting
from lightning_moe.report.chart_scale import percent, short
from lightning_moe.report.charts import line_chart
from lightning_moe.report.page import (
    Section,
    charts,
    details,
    page,
    tiles,
    warning,
)
from lightning_moe.report.routing import dead_experts
from lightning_moe.report.routing_sections import by_layer, few_lines, routing_sections
from lightning_moe.report.run import Run
from lightning_moe.report.series import Series


def run_page(run: Run) -> str:
    """The page about `run`, a whole HTML document."""
    sections = [
        _overview(run),
        _loss(run),
        _balance(run),
        *routing_sections(run.routing),
        _throughput(run),
        _options(run),
    ]
    name = run.option("name")
    title = f"{name or 'Training run'} - {run.folder.resolve().name}"
    return page(title, f"{run.num_steps:,} optimizer steps in {run.folder.resolve()}", sections)


def _overview(run: Run) -> Section:
    val, bits = run.series("val/ce"), run.series("val/bits_per_byte")
    numbers = [
        ("optimizer steps", f"{run.num_steps:,}", _of_planned(run)),
        ("train cross-entropy", short(run.series("train/ce").last), "nats per token, last step"),
        (
            "validation cross-entropy",
            short(val.last),
            f"nats per token; best {short(val.lowest)}"
            if len(val)
            else "no validation was logged yet",
        ),
    ]
    if len(bits):
        numbers.append(("validation bits per byte", short(bits.last), f"best {short(bits.lowest)}"))
    numbers.append(
        (
            "tokens per second",
            short(run.series("train/tokens_per_second").recent_median()),
            "median of the second half",
        )
    )
    load = run.series("train/load_max_over_mean")
    if len(load):
        numbers.append(
            ("busiest expert / mean", short(load.recent_median()), "worst layer, median of a step")
        )
    if len(run.routing):
        numbers += _routing_numbers(run.routing.layers)
    skipped = run.series("train/skipped_steps")
    if len(skipped):
        numbers.append(("skipped steps", short(skipped.last), "with gradients that weren't finite"))
    return Section(
        name="overview",
        title="Overview",
        about=_model_words(run),
        content=(warning(run.silence) if run.silence else "") + tiles(numbers),
        absent="",
    )


def _of_planned(run: Run) -> str:
    planned = run.option("trainer.max_steps")
    return (
        f"of {planned:,} planned"
        if isinstance(planned, int) and planned > 0
        else "until the last log"
    )


def _model_words(run: Run) -> str:
    experts = run.option("model.moe.num_experts")
    if experts is None:
        return "What the run reached so far."
    words = [
        f"{run.option('model.num_layers')} layers of width {run.option('model.d_model')}",
        f"{experts} experts, top-{run.option('model.moe.router.top_k')}",
        f"{run.option('trainer.devices')} device(s), precision {run.option('trainer.precision')}",
    ]
    return f"{'; '.join(words)}."


def _routing_numbers(layers: Sequence[LayerRouting]) -> list[tuple[str, str, str]]:
    dead = sum(len(dead_experts(layer)) for layer in layers)
    total = sum(layer.num_experts for layer in layers)
    numbers = [("dead experts", f"{dead}", f"of {total} in {len(layers)} layers")]
    kept = sum(layer.kept_SE.sum() for layer in layers)
    share = 1 - kept / max(sum(layer.requested_SE.sum() for layer in layers), 1)
    numbers.append(("dropped copies", percent(float(share)), "of all that were requested"))
    return numbers


def _loss(run: Run) -> Section:
    lines = {"train": run.series("train/ce"), "validation": run.series("val/ce")}
    parts = []
    if any(map(len, lines.values())):
        parts.append(line_chart("Cross-entropy", lines, y_label="nats per token"))
    rest = {
        name: run.series(f"train/{key}")
        for name, key in (("loss with all terms", "loss"), ("z-loss, no weight", "z_loss"))
    }
    if any(map(len, rest.values())):
        parts.append(line_chart("The whole loss, and the router's z-loss", rest, y_label="nats"))
    norm = {"gradient norm": run.series("train/grad_norm")}
    if len(norm["gradient norm"]):
        parts.append(line_chart("Gradient norm before clipping", norm, y_label="2-norm"))
    return Section(
        name="loss",
        title="Loss",
        about="Means over the tokens of a step. Validation leaves balance terms out.",
        content=charts(*parts) if parts else "",
        absent="no loss was logged.",
    )


def _balance(run: Run) -> Section:
    loss, load = run.series("train/balance_loss"), run.series("train/load_max_over_mean")
    of_layers = by_layer(run.routing, "balance_S")
    parts = []
    if of_layers:
        parts.append(
            line_chart("Balance loss by layer", of_layers, y_label="1 = even", reference=1.0)
        )
    elif len(loss):
        parts.append(
            line_chart(
                "Balance loss, mean of the layers",
                {"balance loss": loss},
                y_label="1 = even",
                reference=1.0,
            )
        )
    logged = {f"layer {number}": series for number, series in enumerate(_logged_layers(run))}
    lines = few_lines(logged or {"worst layer": load})
    if any(map(len, lines.values())):
        parts.append(
            line_chart("Busiest expert over the mean", lines, y_label="max / mean", reference=1.0)
        )
    return Section(
        name="balance",
        title="Balance",
        about="The balance loss multiplies counts with soft scores: it can fall below 1 while the load itself gets "
        "worse. The busiest expert over the mean comes from counts alone and can't.",
        content=_gerrymandering(run) + charts(*parts) if parts else "",
        absent="neither train/balance_loss nor train/load_max_over_mean was logged.",
    )


def _gerrymandering(run: Run) -> str:
    """A remark on what `ExpertLoadMonitor` warns of: found in the history, or, without one, in what was logged."""
    logged = run.series("train/gerrymandered_layers")
    layers = [
        layer_health(layer)
        for layer, router in zip(run.routing.layers, run.routers, strict=True)
        if router is None or can_be_fooled(router)
    ]
    if layers:
        begun = [int(run.routing.steps_S[entry]) for entry in episodes(layers)]
    else:
        begun = logged.steps[
            np.diff(logged.values > 0, prepend=False) & (logged.values > 0)
        ].tolist()
    if not begun:
        return ""
    steps = ", ".join(map(str, begun))
    return warning(
        f"From step {steps} on the balance loss was low although the load was uneven, and the load got no better: "
        "scores and counts no longer agree (token gerrymandering)."
    )


def _logged_layers(run: Run) -> list[Series]:
    found: list[Series] = []
    while len(series := run.series(f"train/load_max_over_mean/layer_{len(found)}")):
        found.append(series)
    return found


def _throughput(run: Run) -> Section:
    speed = run.series("train/tokens_per_second")
    content = ""
    if len(speed):
        content = charts(
            line_chart("Tokens per second", {"tokens per second": speed}, y_label="tokens / s")
        )
    return Section(
        name="throughput",
        title="Throughput",
        about="Of all ranks together, from the start of one optimizer step to the next; validation is left out.",
        content=content,
        absent="train/tokens_per_second was not logged.",
    )


def _options(run: Run) -> Section:
    text = yaml.safe_dump(run.options, sort_keys=False) if run.options else ""
    return Section(
        name="options",
        title="Options",
        about="As they were resolved for this run.",
        content=details("config.yaml", f"<pre>{escape(text)}</pre>") if text else "",
        absent="there is no config.yaml in its folder.",
    )
