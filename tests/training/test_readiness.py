"""What would stop or spoil a run later is said before it writes anything."""

import dataclasses

import numpy as np
import pytest

from harts.errors import InputError, PlanError
from harts.objectives import GRPO, PPO
from harts.training.data import TrainingData
from harts.training.run import train
from harts.trajectories import TrajectoryBatch, read_trajectories, write_trajectories
from tests.training.runs import Silent, config, rollouts, run


def test_ppo_without_reference_log_probs_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(InputError, match=r"PPO .*ref_logprobs.*objective\.kl_coefficient=0"):
        run(tmp_path, objective={"name": "ppo"})
    assert not (tmp_path / "run").exists()
    run(tmp_path, objective={"name": "ppo", "kl_coefficient": 0.0}, steps=1)


def test_a_last_step_of_an_epoch_that_cannot_fill_the_replicas_is_refused(tmp_path):
    words = r"step 2 \(tree 'tree-\d'\) has 3 trajectories, plan\.replicas is 4.*fillers"
    with pytest.raises(PlanError, match=words):
        run(tmp_path, plan__replicas=4)
    assert not (tmp_path / "run").exists()
    run(tmp_path, plan__replicas=4, plan__fillers=True, steps=2)


def test_a_step_that_needs_more_microbatches_than_fit_the_replicas_is_refused(tmp_path):
    # Three trajectories that share nothing: capacity asks for three microbatches, replicas for two.
    batch = rollouts(trees=2)
    apart = dataclasses.replace(batch, identity=np.arange(batch.raw_tokens))
    changes = {"plan__replicas": 2, "trees_per_step": 1}
    with pytest.raises(PlanError, match=r"step 1 \(tree 'tree-\d'\), plan\.replicas: "):
        run(tmp_path, apart, plan__capacity=100, **changes)
    assert not (tmp_path / "run").exists()
    run(tmp_path, apart, plan__capacity=200, steps=1, **changes)


def test_the_comparison_of_a_step_that_only_sharing_can_plan_still_runs(tmp_path):
    report = run(
        tmp_path,
        plan__replicas=2,
        plan__capacity=94,
        trees_per_step=1,
        steps=1,
        comparison={"repeats": 1, "tokens": 100},
    )
    assert report.times.trajectory_wise_plan.replicas == 1


def test_a_tree_of_several_files_and_a_lone_tree_are_said_once(tmp_path):
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for seed, file in enumerate(files):
        batch = rollouts(trees=1, seed=seed)
        write_trajectories(dataclasses.replace(batch, tree_ids=("0",) * len(batch)), file)
    observer = Silent()
    train(config(tmp_path, data={"files": [str(f) for f in files]}, steps=1), observer)
    said = [m for m in observer.messages if "spans" in m]
    assert said == [
        f"tree '0' spans {files[0]} and {files[1]}: one group of advantages; rename to keep apart"
    ]
    assert any("every step is the whole of it" in m for m in observer.messages)
    alone = TrainingData.of(read_trajectories(files[:1]), GRPO())
    assert not any("spans" in note for note in alone.notes())
    assert TrainingData.of(rollouts(), GRPO()).notes() == []


def test_trees_without_a_difference_in_reward_are_counted():
    batch = rollouts(trees=3, tries=3)
    rewards = np.array([0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 5.0, np.nan, np.nan])
    data = TrainingData.of(dataclasses.replace(batch, rewards=rewards), GRPO())
    assert data.flat_trees == 2
    assert any("2 of 3 trees add nothing" in note for note in data.notes())


@pytest.mark.parametrize("batch", [rollouts(tries=1), rollouts(trees=1, tries=1)])
def test_data_whose_every_advantage_is_zero_are_refused(tmp_path, batch):
    with pytest.raises(InputError, match=r"every advantage is 0.*same tree_id"):
        run(tmp_path, batch)
    assert not (tmp_path / "run").exists()
    reference = dataclasses.replace(batch, ref_logprobs=np.zeros(batch.raw_tokens, np.float32))
    assert TrainingData.of(reference, PPO()).flat_trees == len(batch)
    known = dataclasses.replace(batch, advantages=np.ones(batch.raw_tokens, np.float32))
    assert TrainingData.of(known, GRPO()).flat_trees == 0


def test_trajectories_of_one_token_are_refused_with_that_reason():
    batch = TrajectoryBatch.from_flat([1, 2], [0, 1, 2], rewards=[0.0, 1.0])
    with pytest.raises(InputError, match="no token is predicted"):
        TrainingData.of(batch, GRPO())
