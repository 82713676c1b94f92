"""Optimiser steps on real trajectories: compact training against trajectory-wise training.

    python benchmarks/loss_curves.py --data rollouts.parquet --json curves.json --plot curves.png

The same weights, trees, objective and optimiser in every run; weights in bfloat16, AdamW on a
float32 copy of them. Trees whose rewards are all equal have no policy gradient and are left out.
Trajectory-wise training runs three times, packed to T, T/2 and 2T: where it repeats bit for bit,
other shapes of matrix products and another order of addition stand for reruns. Compact training
passes when it lies no further from the mean of the three than the farthest of them lies from the
mean of the other two.
"""

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from harts.bench.measure import commit
from harts.bench.step import TABLE_1_MODEL, model_named, within_vocabulary
from harts.errors import InputError
from harts.models import TreePolicy, prepare
from harts.objectives import GRPO, StepTargets, prepare_step
from harts.planning.step import plan_step
from harts.training.model import ModelConfig, build_model, vocabulary_of
from harts.training.step import RouterLosses, run_step
from harts.trajectories import TrajectoryBatch, read_trajectories

ROUTER = RouterLosses(load_balancing_coefficient=1e-3)
COMPACT = "compact"
Curve = NDArray[np.float64]


def model_of(name: str, layers: int, vocabulary: int, device: str) -> ModelConfig:
    """The Table 1 model with some of its layers, or the small one."""
    if name != "table-1":
        return model_named(name, vocabulary, device)
    kinds = TABLE_1_MODEL["layer_types"][:layers]
    cut = TABLE_1_MODEL | {"num_hidden_layers": layers, "layer_types": kinds}
    return ModelConfig(model_type="bailing_hybrid", config=cut, dtype="bfloat16")


def policy_of(config: ModelConfig, device: str) -> TreePolicy:
    """The same weights every time."""
    with torch.device(device):
        policy = prepare(build_model(config))
    policy.set_recomputation("selective")
    return policy


def steps_of(batch: TrajectoryBatch, steps: int) -> list[TrajectoryBatch]:
    """One tree a step, all trees whose rewards differ in turns.

    Raises:
        InputError: there is no such tree.
    """
    names = np.array(batch.tree_ids)
    trees = [batch.select(np.flatnonzero(names == name)) for name in dict.fromkeys(batch.tree_ids)]
    trees = [tree for tree in trees if np.ptp(tree.rewards) > 0]
    if not trees:
        raise InputError("no tree has trajectories of different reward: nothing would be learnt")
    return list(itertools.islice(itertools.cycle(trees), steps))


def targets_of(
    policy: TreePolicy, trees: list[TrajectoryBatch], capacity: int
) -> list[StepTargets]:
    """GRPO against the log-probs of the first weights, computed trajectory-wise."""
    known: dict[int, StepTargets] = {}
    for tree in trees:
        if id(tree) not in known:
            plan = plan_step(tree, replicas=1, capacity=capacity, share=False)
            plain = prepare_step(tree, GRPO())
            outcome = run_step(policy, tree, plan, plain, GRPO(), ROUTER)
            known[id(tree)] = dataclasses.replace(plain, old_logprobs=outcome.logprobs.double())
    policy.zero_grad()
    return [known[id(tree)] for tree in trees]


def train(
    policy: TreePolicy,
    trees: list[TrajectoryBatch],
    targets: list[StepTargets],
    capacity: int,
    share: bool,
    rate: float,
) -> Curve:
    """[steps] losses."""
    weights = list(policy.parameters())
    masters = [torch.nn.Parameter(w.detach().float()) for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    losses = []
    for tree, wanted in zip(trees, targets, strict=True):
        plan = plan_step(tree, replicas=1, capacity=capacity, share=share)
        policy.zero_grad()
        losses.append(run_step(policy, tree, plan, wanted, GRPO(), ROUTER).policy_loss)
        for weight, master in zip(weights, masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    return np.array(losses)


def deviations(curves: dict[str, Curve]) -> dict[str, float]:
    """Root mean square distance of each curve from the mean of the other trajectory-wise ones."""
    found = {}
    for name, curve in curves.items():
        others = [c for n, c in curves.items() if n not in (name, COMPACT)]
        found[name] = float(np.sqrt(np.mean((curve - np.mean(others, axis=0)) ** 2)))
    return found


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Loss by step, and each curve's distance from the mean of the trajectory-wise ones."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    above, below = figure.subplots(1, 2)
    mean = np.mean([c for n, c in curves.items() if n != COMPACT], axis=0)
    for name, curve in curves.items():
        style: dict[str, Any] = {"color": "black", "lw": 1.6} if name == COMPACT else {"lw": 0.9}
        above.plot(curve, label=name, **style)
        below.plot(curve - mean, label=name, **style)
    above.set(title="GRPO loss", xlabel="step")
    below.set(title="minus the mean of trajectory-wise runs", xlabel="step")
    above.legend(frameon=False, fontsize=8)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)


def main(
    data: Annotated[Path, typer.Option(help="Trajectories with rewards.")],
    model: Annotated[str, typer.Option(help="table-1 or small.")] = "table-1",
    layers: Annotated[int, typer.Option(help="Layers of table-1.")] = 4,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 100,
    capacity: Annotated[int, typer.Option(help="T.")] = 16_384,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 2e-5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture here.")] = None,
) -> None:
    """Compare loss curves."""
    console = Console()
    batch = read_trajectories([data])
    config = model_of(model, layers, int(batch.tokens.max()) + 1, device)
    policy = policy_of(config, device)
    batch = within_vocabulary(batch, vocabulary_of(policy.model))
    trees = steps_of(batch, steps)
    targets = targets_of(policy, trees, capacity)
    runs = {COMPACT: (capacity, True)}
    runs |= {
        f"trajectory-wise, T = {t}": (t, False) for t in (capacity, capacity // 2, 2 * capacity)
    }
    curves: dict[str, Curve] = {}
    for name, (t, share) in runs.items():
        del policy
        policy = policy_of(config, device)
        began = time.perf_counter()
        curves[name] = train(policy, trees, targets, t, share, rate)
        console.print(
            f"{name}: last loss {curves[name][-1]:.5f}, {time.perf_counter() - began:.0f} s"
        )
    apart = deviations(curves)
    bound = max(value for name, value in apart.items() if name != COMPACT)
    for name, value in apart.items():
        console.print(f"{name}: {value:.2e} from the mean of the others")
    passed = apart[COMPACT] <= bound
    console.print("within the spread" if passed else "OUTSIDE the spread")
    if plot is not None:
        draw(curves, plot)
    if json_file is not None:
        command = (
            f"python benchmarks/loss_curves.py --data {data.name} --model {model} "
            f"--layers {layers} --device {device} --steps {steps} "
            f"--capacity {capacity} --rate {rate}"
        )
        figures = {
            "command": command,
            "commit": commit(),
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "versions": {"torch": torch.__version__},
            "deviations": apart,
            "passed": passed,
            "losses": {name: curve.tolist() for name, curve in curves.items()},
        }
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    typer.run(main)
