import dataclasses
from pathlib import Path

import pytest

from harts.errors import HartsError, InputError, UnsupportedError
from harts.objectives import GRPO, PPO
from harts.training.config import load_config, to_config
from harts.training.model import ModelConfig, build_model
from harts.training.optimizer import ScheduleConfig
from tests.training.runs import MODEL, config, settings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny.yaml"


def test_the_example_loads_and_names_its_run_directory():
    loaded = load_config(EXAMPLE)
    assert loaded.data.preset == "tiny"
    assert loaded.model.model_type == "bailing_hybrid"
    assert loaded.directory == Path("runs/tiny")


def test_the_resolved_configuration_loads_to_the_same_record(tmp_path):
    loaded = load_config(EXAMPLE, ["objective.name=ppo", "optimizer.betas=[0.8,0.9]"])
    file = tmp_path / "config.yaml"
    file.write_text(loaded.as_yaml())
    assert load_config(file) == loaded


def test_overrides_reach_nested_keys_and_keep_their_types():
    loaded = load_config(
        EXAMPLE,
        [
            "optimizer.learning_rate=3e-4",
            "model.config.hidden_size=32",
            "recompute=full",
            "steps=7",
        ],
    )
    assert loaded.optimizer.learning_rate == 3e-4
    assert loaded.model.config["hidden_size"] == 32
    assert loaded.model.config["num_experts"] == 8
    assert loaded.recompute == "full"
    assert loaded.steps == 7


@pytest.mark.parametrize(
    ("override", "files"),
    [
        ("data=a.jsonl", ["a.jsonl"]),
        ("data=[a.jsonl,b.parquet]", ["a.jsonl", "b.parquet"]),
        ("data.files=[a.jsonl]", ["a.jsonl"]),
    ],
)
def test_data_files_replace_the_preset(override, files):
    loaded = load_config(EXAMPLE, [override])
    assert loaded.data.files == files
    assert loaded.data.preset is None


def test_a_preset_replaces_data_files(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: rollouts.jsonl\nmodel: {model_type: bailing_hybrid}\n")
    assert load_config(file).data.files == ["rollouts.jsonl"]
    assert load_config(file, ["data.preset=tiny"]).data.files == []


def test_data_given_by_override_makes_a_run_directory_of_its_own():
    assert load_config(EXAMPLE, ["data=some/rollouts.jsonl"]).directory == Path(
        "runs/tiny-rollouts"
    )
    assert load_config(EXAMPLE, ["data=a.jsonl", "output=here"]).directory == Path("here")


def test_a_model_directory_given_by_override_replaces_the_family_and_its_fields(tmp_path):
    model = load_config(EXAMPLE, ["model.path=some/model", "model.dtype=bfloat16"]).model
    assert model == ModelConfig(path="some/model", dtype="bfloat16")
    file = tmp_path / "mine.yaml"
    file.write_text("data: rollouts.jsonl\nmodel: {path: some/model}\n")
    assert load_config(file, ["model.model_type=bailing_hybrid"]).model.path is None
    with pytest.raises(InputError, match="config is only for a fresh model"):
        load_config(EXAMPLE, ["model.path=some/model", "model.config.hidden_size=8"])


def test_each_objective_takes_its_own_options(tmp_path):
    ppo = config(tmp_path, objective={"name": "ppo", "kl_coefficient": 0.1})
    assert ppo.objective == PPO(kl_coefficient=0.1)
    grpo = config(tmp_path, objective={"scale_by_std": False, "reduction": "sequence-mean"})
    assert grpo.objective == GRPO(scale_by_std=False, reduction="sequence-mean")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stepz": 3}, ["unknown key stepz", "nearest is steps"]),
        ({"optimizer__learningrate": 1.0}, ["optimizer.learningrate", "optimizer.learning_rate"]),
        ({"objective__clip_lo": 0.1}, ["objective.clip_lo", "objective.clip_low"]),
        ({"objective": {"name": "ppo", "epsilon": 1e-6}}, ["unknown key objective.epsilon"]),
        ({"objective__name": "dpo"}, ["objective.name", "grpo", "'dpo'"]),
        ({"objective__clip_low": 2.0}, ["objective: expected clip_low", "2.0"]),
        ({"optimizer__learning_rate": -1.0}, ["optimizer: learning_rate", "above 0", "-1.0"]),
        ({"optimizer__learning_rate": float("nan")}, ["learning_rate", "nan"]),
        ({"optimizer__learning_rate": 1e99}, ["learning_rate", "at most 1000", "1e+99"]),
        ({"optimizer__betas": [0.9]}, ["optimizer.betas", "2 numbers", "[0.9]"]),
        ({"optimizer__betas": [0.9, 1.0]}, ["betas", "below 1"]),
        ({"optimizer__max_grad_norm": 0.0}, ["max_grad_norm", "null"]),
        ({"schedule__kind": "step"}, ["schedule.kind", "constant, linear, cosine", "'step'"]),
        ({"plan__capacity": 0}, ["plan: capacity", "at least 1"]),
        ({"plan__replicas": "two"}, ["plan.replicas", "a whole number", "'two'"]),
        ({"plan__planner": "bets"}, ["plan.planner", "best", "'bets'"]),
        ({"router__z_coefficient": -0.1}, ["router: z_coefficient", "at least 0"]),
        ({"steps": 2.5}, ["steps", "a whole number", "2.5"]),
        ({"trees_per_step": 0}, ["trees_per_step", "at least 1"]),
        ({"recompute": "maybe"}, ["recompute", "none, selective, full", "'maybe'"]),
        ({"engine": "megatron", "recompute": "selective"}, ["selective", "none or full"]),
        ({"optimizer": 3}, ["optimizer", "a section", "3"]),
        ({"data": {}}, ["data: expected either files or a preset", "neither"]),
        ({"data": {"preset": "huge"}}, ["data: preset", "tiny", "'huge'"]),
        ({"model": None}, ["model: expected either model_type or path", "neither"]),
        ({"model__path": "somewhere"}, ["model: expected either model_type or path", "both"]),
        ({"model__dtype": "float16"}, ["model.dtype", "bfloat16", "'float16'"]),
        ({"comparison__repeats": 0}, ["comparison: repeats"]),
        ({"megatron__tensor_parallel": 0}, ["megatron: tensor_parallel", "at least 1"]),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(tmp_path, changes, words):
    with pytest.raises(InputError) as caught:
        config(tmp_path, **changes)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        (None, [], "cannot read"),
        ("steps: [1", [], "not a valid configuration"),
        ("- a\n- b\n", [], "key: value"),
        ("steps: ${nowhere}\n", [], "not a valid configuration"),
        ("steps: 1\n", ["steps"], "key=value"),
        ("steps: 1\n", ["=3"], "key=value"),
    ],
)
def test_an_unreadable_configuration_is_one_sentence(tmp_path, content, overrides, words):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(HartsError, match=words):
        load_config(file, overrides)


def test_a_misspelt_model_field_is_refused_with_the_nearest():
    model = ModelConfig(model_type="bailing_hybrid", config={**MODEL, "hiden_size": 8})
    with pytest.raises(InputError, match=r"model\.config\.hiden_size .* 'hidden_size'"):
        build_model(model)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"layer_types": ["linear_attention"]}])
def test_a_bad_model_field_is_one_sentence(change):
    model = ModelConfig(model_type="bailing_hybrid", config={**MODEL, **change})
    with pytest.raises(InputError, match=r"model\.config"):
        build_model(model)


def test_an_unknown_model_family_is_refused_with_those_that_exist():
    with pytest.raises(UnsupportedError, match="bailing_hybrid"):
        build_model(ModelConfig(model_type="gpt2"))


def test_a_model_directory_that_is_not_one_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        build_model(ModelConfig(path=str(tmp_path)))


def test_special_tokens_of_the_family_beyond_a_small_vocabulary_are_dropped():
    model = build_model(ModelConfig(model_type="bailing_hybrid", config=dict(MODEL)))
    assert model.config.pad_token_id is None
    assert model.config.eos_token_id is None


def test_a_model_seed_gives_the_same_weights_and_leaves_the_generator_alone():
    import torch

    before = torch.get_rng_state()
    one, other, third = (
        build_model(ModelConfig(model_type="bailing_hybrid", config=dict(MODEL), seed=seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, third.lm_head.weight)


def test_the_learning_rate_warms_up_and_then_follows_its_kind():
    def factors(kind: str) -> list[float]:
        schedule = ScheduleConfig(warmup_steps=2, kind=kind)
        return [round(schedule.factor(step, 6), 6) for step in range(6)]

    assert factors("constant") == [0.5, 1, 1, 1, 1, 1]
    assert factors("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert factors("cosine") == [0.5, 1, 1, 0.853553, 0.5, 0.146447]


def test_a_mapping_and_its_record_say_the_same(tmp_path):
    record = to_config(settings(tmp_path))
    assert to_config(record.as_mapping()) == record
    assert dataclasses.replace(record, steps=9).as_mapping()["steps"] == 9


def test_sizes_of_an_engine_that_does_not_run_are_refused():
    loaded = load_config(EXAMPLE)
    assert to_config(loaded.as_mapping()) == loaded, "every default spelled out is no choice"
    with pytest.raises(InputError, match=r"expected engine: megatron.*got engine: huggingface"):
        load_config(EXAMPLE, ["megatron.expert_parallel=2"])
