"""The table at the end of a run, and the same numbers as JSON."""

import json
from typing import Any

from rich.table import Table

from harts.planning.step import StepPlan
from harts.training.checkpoint import write_whole
from harts.training.comparison import FIDELITY_BOUND
from harts.training.run import RunReport


def summary(report: RunReport) -> dict[str, Any]:
    """The numbers of the final table, by name."""
    metrics = report.metrics
    raw = sum(m.raw_tokens for m in metrics)
    compact = sum(m.compact_tokens for m in metrics)
    window = min(report.steps_per_epoch, max(len(metrics) // 2, 1))
    margins = [m.margin for m in metrics if m.margin is not None]
    values: dict[str, Any] = {
        "steps": len(metrics),
        "trajectories": sum(m.trajectories for m in metrics),
        "tokens_before_sharing": raw,
        "tokens_after_sharing": compact,
        "compression": raw / compact,
        "replay_tokens": sum(m.replay_tokens for m in metrics),
        "calls_per_layer_and_step": sum(m.calls for m in metrics) / len(metrics),
        "loss_first": metrics[0].loss,
        "loss_last": metrics[-1].loss,
        "on_policy": all(abs(m.objective.get("ratio", 1.0) - 1.0) < 1e-6 for m in metrics),
        "margin_window": window,
        "margin_first": _mean(margins[:window]),
        "margin_last": _mean(margins[-window:]),
        "training_s": report.training_s,
    }
    if report.times is not None and report.fidelity is not None:
        times, fidelity = report.times, report.fidelity
        values |= {
            "step_s_trajectory_wise": times.trajectory_wise_s,
            "step_s_shared": times.shared_s,
            "speedup": times.trajectory_wise_s / times.shared_s,
            "calls_trajectory_wise": _calls(times.trajectory_wise_plan),
            "calls_shared": _calls(times.shared_plan),
            "compared_step_tokens_before": times.shared_plan.raw_tokens,
            "compared_step_tokens_after": times.shared_plan.objective.total_work,
            "excerpt_trajectories": fidelity.trajectories,
            "excerpt_tokens_before": fidelity.tokens,
            "excerpt_tokens_after": fidelity.compact_tokens,
            "largest_logprob_difference": fidelity.logprob,
            "largest_gradient_difference": fidelity.gradient,
            "fidelity_bound": FIDELITY_BOUND,
            "fidelity_passed": fidelity.passed,
        }
    return values


def write_summary(report: RunReport) -> None:
    """Leave the numbers in summary.json of the run directory.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_whole(report.directory / "summary.json", json.dumps(summary(report), indent=2) + "\n")


def final_table(report: RunReport) -> Table:
    """The numbers of a run in words, for a terminal."""
    values = summary(report)
    table = Table(title=f"Training run {report.directory}", show_header=False, min_width=72)
    table.add_column(style="bold")
    table.add_column(justify="right")
    sections = [_work(values), _learning(values)]
    if report.times is not None:
        sections += [_speed(values), _exactness(values)]
    for rows in sections:
        for name, value in rows:
            table.add_row(name, value)
        table.add_section()
    return table


Rows = list[tuple[str, str]]


def _work(v: dict[str, Any]) -> Rows:
    share = v["replay_tokens"] / v["tokens_after_sharing"]
    return [
        ("optimiser steps", f"{v['steps']:,}"),
        ("trajectories trained on, repeats counted", f"{v['trajectories']:,}"),
        ("tokens before sharing: each trajectory alone", f"{v['tokens_before_sharing']:,}"),
        ("tokens after sharing: each common prefix once", f"{v['tokens_after_sharing']:,}"),
        ("compression", f"{v['compression']:.2f} x fewer tokens"),
        ("calls of a linear-attention layer in a step", f"{v['calls_per_layer_and_step']:.1f}"),
        ("replay: tokens these calls run again at forks", f"{v['replay_tokens']:,} ({share:.0%})"),
    ]


def _learning(v: dict[str, Any]) -> Rows:
    note = "\n(advantages cancel out, so it stays near 0)" if v["on_policy"] else ""
    change = f"{v['loss_first']:+.4f} to {v['loss_last']:+.4f}"
    rows = [(f"loss, first to last step{note}", change)]
    if v["margin_first"] is not None:
        window = v["margin_window"]
        steps = "step" if window == 1 else f"{window} steps"
        rows.append(
            (
                "margin: log-prob of a token in a better- minus in a\n"
                f"worse-than-average try, first to last {steps}",
                f"{v['margin_first']:+.3f} to {v['margin_last']:+.3f}",
            )
        )
    return rows


def _speed(v: dict[str, Any]) -> Rows:
    before, after = v["compared_step_tokens_before"], v["compared_step_tokens_after"]
    return [
        (
            f"last step, trajectory-wise: {before:,} tokens ({v['calls_trajectory_wise']} calls)",
            f"{v['step_s_trajectory_wise']:.2f} s",
        ),
        (
            f"last step, shared: {after:,} tokens ({v['calls_shared']} calls)",
            f"{v['step_s_shared']:.2f} s",
        ),
        (f"faster, with {before / after:.2f} x fewer tokens", f"{v['speedup']:.2f} x"),
    ]


def _exactness(v: dict[str, Any]) -> Rows:
    return [
        (
            f"against each of {v['excerpt_trajectories']} trajectories alone, in float64:\n"
            "largest difference of a log-prob",
            f"\n{_verdict(v['largest_logprob_difference'], v['fidelity_bound'])}",
        ),
        (
            "largest difference of a gradient, relative",
            _verdict(v["largest_gradient_difference"], v["fidelity_bound"]),
        ),
    ]


def _verdict(difference: float, bound: float) -> str:
    verdict = "" if difference <= bound else f" [bold red]PAST BOUND {bound:.0e}[/]"
    return f"{difference:.1e}{verdict}"


def _calls(plan: StepPlan) -> int:
    return sum(len(m.calls.rounds) for m in plan.microbatches)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
