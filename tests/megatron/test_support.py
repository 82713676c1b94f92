"""What Megatron settings, models, weights and plans are refused, each with a sentence."""

import copy
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harts.errors import InputError, UnsupportedError

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "needs megatron-core, which pip install 'harts[megatron]' brings", allow_module_level=True
    )

from harts.megatron import MegatronEngine, build_model, load_hugging_face, transformer_config
from harts.megatron.layers import heads_of_rank
from harts.megatron.packet import make_packet, tree_of
from harts.megatron.ranks import ParallelRanks
from harts.megatron.support import check_supported
from tests.forests import hard_tree, lay_out
from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.grid import Case, build, grid, settings
from tests.megatron.small import OBJECTIVE, Work, small_config, small_model


def config_with(**changes: Any) -> Any:
    config = transformer_config(small_config(), **settings(Case()))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


REFUSED: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "TP without SP": ({}, {"tp_size": 2}, "set sequence_parallel=True"),
    "heads": ({}, {"cp_size": 8}, "4 heads cannot be cut .* context parallel size 8"),
    "fixed rows": (
        {"variable_seq_lengths": False},
        {"pp_size": 2},
        "set variable_seq_lengths=True",
    ),
    "two interleaved stages": (
        {"virtual_pipeline_model_parallel_size": 2},
        {"pp_size": 2},
        "set overlap_p2p_comm=True and batch_p2p_comm=False",
    ),
    "stage layout": ({"pipeline_model_parallel_layout": "Et|tL"}, {}, "leave it None"),
    "hybrid CP": ({"hybrid_context_parallel": True}, {}, "hybrid_context_parallel"),
    "averaged loss": (
        {"calculate_per_token_loss": False},
        {},
        "set calculate_per_token_loss=True",
    ),
    "Megatron's z-loss": ({"moe_z_loss_coeff": 1e-3}, {}, "give RouterLosses a z_coefficient"),
    "sequence form": (
        {"moe_router_load_balancing_type": "seq_aux_loss"},
        {},
        "moe_router_load_balancing_type='seq_aux_loss' would count rows",
    ),
    "global form": (
        {"moe_router_load_balancing_type": ["global_aux_loss"]},
        {},
        "give RouterLosses a coefficient and a form",
    ),
    "MTP": ({"mtp_num_layers": 1}, {}, "leave mtp_num_layers None"),
    "dropout": ({"hidden_dropout": 0.1}, {}, "one dropout mask"),
    "selective recomputation": (
        {"recompute_granularity": "selective"},
        {},
        r"recompute whole layers \('full'\)",
    ),
    "spread activations": ({"distribute_saved_activations": True}, {}, "set it False"),
    "fp8": ({"fp8": "hybrid"}, {}, "fp8 and fp4 are not tried"),
    "CUDA graphs": ({"cuda_graph_impl": "local"}, {}, "CUDA graphs do not fit"),
    "split layers": ({"overlap_moe_expert_parallel_comm": True}, {}, "lose the tree"),
    "heterogeneous": ({"heterogeneous_block_specs": True}, {}, "heterogeneous_block_specs"),
    "dropped tokens": (
        {"moe_expert_capacity_factor": 1.0},
        {},
        "drop a shared row from all of its trajectories",
    ),
    "dispatcher": ({"moe_token_dispatcher_type": "allgather"}, {}, "set it to 'alltoall'"),
    "experts": ({}, {"ep_size": 3}, "8 experts cannot be cut over expert parallel size 3"),
    "jitter": ({"moe_input_jitter_eps": 0.1}, {}, "routing must be deterministic"),
    "weighted inputs": ({"moe_apply_probs_on_input": True}, {}, "experts weigh what they make"),
    "latent experts": ({"moe_latent_size": 8}, {}, "leave .* moe_latent_size None"),
    "fused router": ({"moe_router_fusion": True}, {}, "moe_router_fusion is not tried"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_setting_is_refused(name: str) -> None:
    changes, sizes, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        check_supported(config_with(**changes), ParallelRanks(**sizes))


def test_the_small_model_s_settings_are_not_refused() -> None:
    check_supported(config_with(), ParallelRanks())


def test_every_fault_is_named_at_once() -> None:
    config = config_with(hidden_dropout=0.1, moe_z_loss_coeff=1.0)
    with pytest.raises(UnsupportedError, match=r"z_coefficient; .*dropout mask"):
        check_supported(config, ParallelRanks())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": 8}, "q_lora_rank=8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"num_experts_per_tok": 2}, "twice as many experts a token as groups"),
        ({"model_type": "llama"}, r"'llama' does not run in Megatron.*\['bailing_hybrid', 'qwen3"),
    ],
)
def test_model_is_refused(changes: dict[str, Any], message: str) -> None:
    source = copy.copy(small_config())
    names = small_config().attribute_map
    plain = {names.get(n, n): v for n, v in changes.items()}
    source = SimpleNamespace(**{n: getattr(source, n) for n in _READ} | changes | plain)
    with pytest.raises(UnsupportedError, match=message):
        transformer_config(source)


_READ = (
    "model_type",
    "q_lora_rank",
    "attention_bias",
    "tie_word_embeddings",
    "norm_topk_prob",
    "hidden_act",
    "num_key_value_heads",
    "num_attention_heads",
    "mlp_layer_types",
    "num_experts_per_tok",
    "topk_group",
    "rope_parameters",
)


def test_a_window_of_attention_is_refused() -> None:
    source = small_config("qwen3")
    source.sliding_window = 8
    with pytest.raises(UnsupportedError, match=r"sliding_window=8 .* attention without a window"):
        transformer_config(source)
    source = small_config("qwen3")
    source.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedError, match=r"layer types \['sliding_attention'\]"):
        transformer_config(source)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    def group(size: int) -> Any:
        return SimpleNamespace(size=lambda: size)

    groups = SimpleNamespace(tp=group(2), cp=group(4))
    assert heads_of_rank(16, groups, kind="attention") == 8
    with pytest.raises(UnsupportedError, match="4 linear-attention key heads cannot be cut"):
        heads_of_rank(4, groups, kind="linear-attention key")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with megatron_on_cpu(), grid(Case()):
        yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_wrong_weights_are_refused() -> None:
    source = small_config()
    chunks = build_model(source, config_with(params_dtype=torch.float64))
    weights = dict(small_model().state_dict())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(InputError, match=r"no tensor 'model\.norm\.weight'"):
        load_hugging_face(chunks, source, weights)
    weights["model.norm.weight"] = norm[:5]
    with pytest.raises(InputError, match=r"has shape \(5,\), expected \(32,\)"):
        load_hugging_face(chunks, source, weights)
    weights["model.norm.weight"] = norm
    weights["model.layers.0.self_attn.forget_gate.dt_bias"] = norm[:3]
    with pytest.raises(InputError, match=r"dt_bias' has shape \(3,\), from which"):
        load_hugging_face(chunks, source, weights)


@pytest.mark.usefixtures("alone")
def test_plans_that_do_not_fit_and_bare_chunks_are_refused() -> None:
    chunks, _ = build(Case(), small_model().state_dict())
    engine, work = MegatronEngine(chunks), Work(replicas=2)
    step = (work.batch(), work.plan(), work.targets(), OBJECTIVE, work.router)
    with pytest.raises(InputError, match=r"for 2 replicas, and 1 data-parallel.*replicas=1"):
        engine.run_step(*step)
    engine.chunks = [*chunks, *chunks]
    engine.ranks = dataclasses.replace(engine.ranks, dp_size=2, pp_size=3)
    with pytest.raises(InputError, match="in groups of 3, and the plan has 2"):
        engine.run_step(*step)
    with pytest.raises(InputError, match=r"wrap each chunk in megatron\.core\.distributed"):
        MegatronEngine([chunks[0].module])


@pytest.mark.usefixtures("alone")
def test_a_router_outside_a_layer_is_refused() -> None:
    (chunk,) = build_model(small_config(), config_with(params_dtype=torch.float64))
    router = chunk.decoder.layers[1].mlp.router.train()
    with pytest.raises(UnsupportedError, match="recompute whole layers"):
        router(torch.zeros(2, 1, 32, dtype=torch.float64))


def test_rows_that_cannot_be_cut_and_layers_without_a_tree_are_refused() -> None:
    _, _, layout = lay_out(hard_tree(51).select(range(1)), chunk_size=64, row_multiple=3)
    ranks = ParallelRanks(tp_size=2, cp_size=2)
    assert layout.rows % 4
    with pytest.raises(InputError, match="build the layout with row_multiple=4"):
        make_packet(layout, ranks, "cpu", router=None)
    with pytest.raises(UnsupportedError, match="called without a rollout tree"):
        tree_of(None)


def test_without_megatron_core_the_rest_of_the_package_imports() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "import harts, harts.training.step, harts.cli\n"
        "try:\n    import harts.megatron\nexcept ImportError as error:\n    print(error)"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert "harts[megatron]" in run.stdout
