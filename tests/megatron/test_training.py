"""``harts train`` with ``engine: megatron``, on gloo: as the Hugging Face engine, and resumable."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
import typer

pytest.importorskip(
    "megatron.core", reason="needs megatron-core, which pip install 'harts[megatron]' brings"
)

from harts.errors import InputError
from harts.training.config import to_config
from harts.training.parallel import MegatronConfig, check_launch
from harts.training.run import train as train_in_one_process
from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.grid import processes
from tests.training.runs import Silent, settings

PROCESSES = 4
BOUND = 1e-4
"""In float32, for losses and norms after some steps."""
TP2_PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}
TP2_EP2 = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}
DP2_EP2 = {"expert_parallel": 2}
Run = tuple[int, dict[str, int], int]
"""Processes, sizes and last step."""
RUNS: Sequence[tuple[str, Run]] = (
    ("whole", (2, DP2_EP2, 4)),
    ("pieces", (4, TP2_EP2, 2)),
    ("pieces", (4, TP2_PP2, 3)),
    ("pieces", (2, TP2_EP2, 4)),
)
"""By run directory; the runs in one follow each other."""


def configuration(folder: Path, sizes: dict[str, int], steps: int, **more: object) -> Any:
    return to_config(
        settings(
            folder,
            engine="megatron",
            megatron=sizes,
            steps=steps,
            # Whatever the number of replicas, the same loss.
            router__load_balancing_coefficient=0.0,
            plan__fillers=True,
            **more,
        )
    )


def run_process(rank: int, folder: str) -> None:
    """All runs, one after the other, each in process groups of its own."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    from harts.megatron.training import train

    for number, (output, (count, sizes, steps)) in enumerate(RUNS):
        if rank >= count:
            continue
        config = configuration(Path(folder), sizes, steps, output=f"{folder}/{output}")
        store = f"{folder}/store{number}"
        with processes(rank, count, store), megatron_on_cpu(float64=False):
            report = train(config, Silent())
        assert (report is not None) == (rank == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    configuration(made, {}, 1)  # writes the data
    mp.spawn(run_process, (str(made),), nprocs=PROCESSES)
    return made


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def close(found: dict[str, Any], truth: dict[str, Any]) -> None:
    for name in ("loss", "policy_loss", "grad_norm", "logprob_above", "logprob_below"):
        assert found[name] == pytest.approx(truth[name], rel=BOUND, abs=1e-6), name
    for name in ("step", "learning_rate", "raw_tokens", "expert_load"):
        assert found[name] == truth[name]


def test_steps_are_those_of_the_hugging_face_engine(folder: Path) -> None:
    values = configuration(folder, {}, 4).as_mapping()
    values |= {"engine": "huggingface", "output": str(folder / "reference")}
    train_in_one_process(to_config(values), Silent())
    for found, truth in zip(metrics(folder / "whole"), metrics(folder / "reference"), strict=True):
        close(found, truth)


def test_a_stopped_run_goes_on_under_other_sizes_to_the_same_numbers(folder: Path) -> None:
    whole, pieces = metrics(folder / "whole"), metrics(folder / "pieces")
    assert [m["step"] for m in pieces] == [1, 2, 3, 4]
    for found, truth in zip(pieces, whole, strict=True):
        close(found, truth)


def test_a_checkpoint_is_a_model_that_the_library_loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    kept = sorted((folder / "pieces" / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-000003", "step-000004"]
    models = [AutoModelForCausalLM.from_pretrained(p).state_dict() for p in kept]
    changed = [n for n, t in models[0].items() if not torch.equal(t, models[1][n])]
    assert len(changed) > len(models[0]) // 2


@pytest.mark.parametrize(
    ("sizes", "environment", "message"),
    [
        ({}, {}, "with torchrun"),
        ({"tensor_parallel": 4}, {"WORLD_SIZE": "6", "RANK": "0"}, "a multiple of 4"),
        ({"expert_parallel": 4}, {"WORLD_SIZE": "2", "RANK": "0"}, "does not divide"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(
    sizes: dict[str, int], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_launch(MegatronConfig(**sizes), environment)


def test_a_missing_megatron_is_named() -> None:
    with (
        mock.patch("harts.training.parallel.find_spec", return_value=None),
        pytest.raises(InputError, match="pip install"),
    ):
        check_launch(MegatronConfig(), {"WORLD_SIZE": "1", "RANK": "0"})


@pytest.mark.parametrize(("local", "heard"), [("0", InputError), ("1", typer.Exit)])
def test_one_process_of_a_machine_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str, heard: type[Exception]
) -> None:
    from harts.cli.train import train

    file = tmp_path / "run.yaml"
    file.write_text(configuration(tmp_path, {"tensor_parallel": 2}, 1).as_yaml())
    for name, value in {"WORLD_SIZE": "3", "RANK": local, "LOCAL_RANK": local}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(heard):
        train(file)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    with processes(0, 1, str(folder / "store")), megatron_on_cpu(float64=False):
        yield


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan__replicas": 3}, "leave plan.replicas out"),
        ({"model__dtype": "float64"}, "bfloat16 or float32"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    from harts.errors import HartsError
    from harts.megatron.training import train

    with alone(tmp_path), pytest.raises(HartsError, match=message):
        train(configuration(tmp_path, {}, 1, **changes), Silent())
    assert not (tmp_path / "run").exists()
