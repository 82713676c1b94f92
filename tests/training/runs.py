"""A model and rollout trees small enough that a training step takes a tenth of a second."""

from pathlib import Path

import numpy as np

from harts.training.config import TrainConfig, to_config
from harts.training.loop import Trainer
from harts.training.metrics import StepMetrics
from harts.training.run import RunReport, train
from harts.trajectories import TrajectoryBatch, write_trajectories

VOCABULARY = 64
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


def rollouts(trees: int = 3, tries: int = 3, seed: int = 0) -> TrajectoryBatch:
    """Trees whose tries share 70 tokens, fork behind the first chunk and end in 12 of their own."""
    rng = np.random.default_rng(seed)
    tokens, rewards, names = [], [], []
    for tree in range(trees):
        shared = rng.integers(VOCABULARY, size=70)
        for attempt in range(tries):
            tokens.append(np.concatenate([shared, rng.integers(VOCABULARY, size=12)]))
            rewards.append(float(attempt == 0))
            names.append(f"tree-{tree}")
    lengths = [len(t) for t in tokens]
    return TrajectoryBatch.from_flat(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        rewards=rewards,
        tree_ids=names,
    )


def settings(folder: Path, batch: TrajectoryBatch | None = None, **changes: object) -> dict:
    """The mapping of a configuration that trains `batch` in `folder`/run; `a__b` changes a.b."""
    file = folder / "rollouts.parquet"
    if batch is not None or not file.exists():
        write_trajectories(batch or rollouts(), file)
    values: dict = {
        "data": {"files": [str(file)]},
        "model": {"model_type": "bailing_hybrid", "config": dict(MODEL)},
        "plan": {"capacity": 256},
        "router": {"load_balancing_coefficient": 1e-2, "expert_bias_rate": 1e-3},
        "optimizer": {"learning_rate": 3e-3},
        "comparison": {"enabled": False},
        # Wherever the tests run, the same numbers; but Megatron takes the GPU it is given.
        "device": "auto" if changes.get("engine") == "megatron" else "cpu",
        "steps": 4,
        "trees_per_step": 2,
        "checkpoint_every": 2,
        "output": str(folder / "run"),
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        section = values
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return values


def config(folder: Path, batch: TrajectoryBatch | None = None, **changes: object) -> TrainConfig:
    return to_config(settings(folder, batch, **changes))


class Silent:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[StepMetrics] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def working(self, text: str) -> None:
        pass

    def planned(self, step: int, plan: object) -> None:
        pass

    def microbatch_done(self) -> None:
        pass

    def step_done(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)


def run(folder: Path, batch: TrajectoryBatch | None = None, **changes: object) -> RunReport:
    return train(config(folder, batch, **changes), Silent())


def start(folder: Path, **changes: object) -> Trainer:
    return Trainer.start(config(folder, **changes))


def curve(metrics: object) -> list[dict]:
    """Everything of the steps but wall clock, to compare bit for bit."""
    return [{k: v for k, v in m.as_mapping().items() if k != "seconds"} for m in metrics]
