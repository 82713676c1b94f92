"""Synthetic workloads: deterministic, of the shape asked for, with the sizes of the paper."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from harts.errors import InputError
from harts.planning.step import plan_step
from harts.synth import PRESETS, synthesize

PAPER_TABLE_2 = {
    1: (1_551, 42_329_859, 7_780_586),
    2: (1_693, 44_799_214, 7_670_675),
    3: (2_368, 58_835_220, 7_747_595),
    4: (1_283, 34_603_796, 5_659_215),
    5: (1_613, 43_931_290, 8_266_355),
    6: (1_752, 48_612_718, 9_671_964),
    7: (1_457, 38_966_280, 7_015_681),
    8: (1_411, 38_541_212, 7_504_249),
    9: (1_738, 48_352_605, 9_188_374),
    10: (1_304, 36_062_624, 7_077_264),
}
CAPACITY = 65_536


def sorted_prefixes(batch):
    """Lengths and adjacent LCPs in lexicographic order: the trie of a batch, independently."""
    rows = [batch.trajectory(row) for row in range(len(batch))]
    rows.sort(key=lambda tokens: tokens.astype(">u4").tobytes())
    lcp = [0]
    for first, second in pairwise(rows):
        shared = min(first.size, second.size)
        differ = first[:shared] != second[:shared]
        lcp.append(int(np.argmax(differ)) if differ.any() else shared)
    return np.array([tokens.size for tokens in rows]), np.array(lcp)


def trie_size(batch):
    lengths, lcp = sorted_prefixes(batch)
    return int(lengths.sum() - lcp.sum())


def plan(batch, replicas):
    return plan_step(batch, replicas=replicas, capacity=CAPACITY)


def check_step(step):
    """Slots at D = 4 and D = 2 of a step that has the sizes of the paper's."""
    paths, raw, compact = PAPER_TABLE_2[step]
    batch = synthesize(f"table2-{step}", seed=0)
    assert len(batch) == paths
    assert batch.raw_tokens == raw
    assert trie_size(batch) == pytest.approx(PRESETS[f"table2-{step}"].compact_tokens, rel=0.001)
    four, two = plan(batch, 4), plan(batch, 2)
    assert four.objective.total_work == pytest.approx(compact, rel=0.01)
    return four.slots, two.slots


def test_the_first_step_has_the_sizes_of_the_papers_table():
    four, two = check_step(1)
    # Table 3 has 301 and 599 slots for all steps; as many for each token of this one.
    share = PAPER_TABLE_2[1][2] / sum(compact for _, _, compact in PAPER_TABLE_2.values())
    assert four == pytest.approx(301 * share, abs=1)
    assert two == pytest.approx(599 * share, abs=2)


@pytest.mark.slow
def test_ten_steps_have_the_sizes_and_the_slots_of_the_papers_tables():
    slots = np.array([check_step(step) for step in PAPER_TABLE_2]).sum(axis=0)
    assert slots[0] == pytest.approx(301, rel=0.02)
    assert slots[1] == pytest.approx(599, rel=0.02)


@pytest.mark.parametrize("missing", [-7, -3, 0, 2, 5, 9])
def test_raw_tokens_are_met_to_the_token(missing):
    shape = replace(PRESETS["small"], raw_tokens=PRESETS["small"].raw_tokens + missing)
    assert synthesize(shape, 0).raw_tokens == shape.raw_tokens
    assert synthesize(replace(shape, exact=False), 0).raw_tokens != shape.raw_tokens


@pytest.mark.parametrize("seed", range(10))
def test_tiny_is_what_two_cores_train_in_minutes(seed):
    batch = synthesize("tiny", seed)
    assert len(batch) == 80
    assert len(set(batch.tree_ids)) == 8
    assert batch.raw_tokens == pytest.approx(20_000, rel=0.05)
    assert 4 <= batch.raw_tokens / trie_size(batch) <= 5
    assert batch.lengths.max() <= 600
    assert batch.tokens.max() < 512


def test_small_has_a_million_tokens():
    batch = synthesize("small", 0)
    assert batch.raw_tokens == 1_000_000
    assert trie_size(batch) == pytest.approx(200_000, rel=0.01)


def test_same_seed_same_workload_and_other_seed_another():
    first, again, other = synthesize("tiny", 3), synthesize("tiny", 3), synthesize("tiny", 4)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.rewards, again.rewards)
    assert first.trajectory_ids == again.trajectory_ids
    assert not np.array_equal(first.tokens[:100], other.tokens[:100])


def test_tokens_of_a_seed_never_change():
    """A changed digest makes earlier measurements incomparable: change it knowingly."""
    batch = synthesize("tiny", 0)
    digest = hashlib.sha256(batch.tokens.astype("<i4").tobytes() + batch.loss_mask.tobytes())
    assert digest.hexdigest()[:16] == "5195f9ee393b31a0"


def test_every_task_has_successes_and_failures():
    for seed in range(20):
        batch = synthesize("tiny", seed)
        assert set(np.unique(batch.rewards)) == {0.0, 1.0}
        trees = np.array(batch.tree_ids)
        assert all(np.ptp(batch.rewards[trees == tree]) == 1 for tree in set(trees))


def test_tasks_share_the_system_prompt_and_sub_agents_have_their_own():
    batch = synthesize("small", 0)
    shape = PRESETS["small"]
    first = batch.tokens[: shape.system_prompt]
    opens = [np.array_equal(batch.trajectory(r)[: first.size], first) for r in range(len(batch))]
    assert {tree for tree, own in zip(batch.tree_ids, opens, strict=True) if own} == set(
        batch.tree_ids
    )
    agents = [batch.trajectory(row) for row, own in enumerate(opens) if not own]
    assert len(agents) > 1
    shared = shape.subagent_system_prompt
    assert all(np.array_equal(agent[:shared], agents[0][:shared]) for agent in agents)


def test_compaction_starts_again_behind_the_system_prompt():
    """With a low limit no trajectory outgrows it by more than a turn, and more roots appear."""
    shape = replace(PRESETS["tiny"], context_limit=250, compact_tokens=6_000)
    compacted, plain = synthesize(shape, 0), synthesize("tiny", 0)
    system = PRESETS["tiny"].system_prompt

    def openings(batch):
        return {batch.trajectory(row)[: system + 1].tobytes() for row in range(len(batch))}

    assert len(openings(compacted)) > len(openings(plain))


def test_prompts_and_observations_are_outside_the_loss():
    batch = synthesize("tiny", 0)
    system = PRESETS["tiny"].subagent_system_prompt
    assert not any(batch.loss_mask[start : start + system].any() for start in batch.offsets[:-1])
    shares = [batch.loss_mask[a:b].mean() for a, b in pairwise(batch.offsets)]
    assert all(0 < share < 1 for share in shares)
    assert batch.logprobs is None


def test_unknown_presets_are_refused_with_the_names_there_are():
    with pytest.raises(InputError, match=r"tiny.*'huge'"):
        synthesize("huge", 0)


@pytest.mark.parametrize(
    "change",
    [{"trajectories": 15}, {"compact_tokens": 30_000}, {"compact_tokens": 0}],
)
def test_impossible_shapes_are_refused(change):
    with pytest.raises(InputError, match="WorkloadShape: expected"):
        replace(PRESETS["tiny"], **change)


@pytest.mark.parametrize("change", [{"compact_tokens": 1_000}, {"max_length": 200}])
def test_targets_that_the_lengths_cannot_meet_are_refused(change):
    with pytest.raises(InputError, match="synthesize: expected"):
        synthesize(replace(PRESETS["tiny"], **change), 0)


def test_synthesis_needs_no_torch():
    program = "import sys; from harts.synth import synthesize; synthesize('tiny', 0); "
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
