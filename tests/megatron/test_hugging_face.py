"""Hugging Face directories on any layout: what is read is written back, bit for bit."""

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

pytest.importorskip(
    "megatron.core", reason="needs megatron-core, which pip install 'harts[megatron]' brings"
)

from tests.megatron.cpu import megatron_on_cpu
from tests.megatron.grid import Case, grid, processes, settings
from tests.megatron.small import Work, small_config, small_model

PROCESSES = 4
LAYOUTS = {
    "single": Case(),
    "TP2": Case(tp=2),
    "PP2 DP2 EP2": Case(pp=2, dp=2, ep=2),
    "TP2 EP4, experts whole": Case(tp=2, dp=2, ep=4, expert_tp=1),
    "CP2 TP2 EP2": Case(cp=2, tp=2, ep=2),
    "PP2 interleaved": Case(pp=2, virtual=2),
    "Qwen3-Next, TP2 EP2": Case(tp=2, dp=2, ep=2, work=Work(family="qwen3_next")),
    "Qwen3 MoE, TP2 EP2": Case(tp=2, dp=2, ep=2, work=Work(family="qwen3_moe")),
}
FAMILIES = {case.work.family for case in LAYOUTS.values()}
SHARD = 20_000
"""Bytes of a file: every expert layer spans several."""


def run_process(rank: int, folder: str) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.set_num_threads(1)
    from harts.megatron import build_model, load_hugging_face, transformer_config
    from harts.megatron.hugging_face import DirectoryWeights, save_hugging_face

    for number, (name, case) in enumerate(LAYOUTS.items()):
        if rank >= case.processes:
            continue
        source = small_config(case.work.family)
        original = Path(folder) / case.work.family
        with (
            processes(rank, case.processes, f"{folder}/store{number}"),
            megatron_on_cpu(float64=False),
            grid(case),
        ):
            config = transformer_config(source, **settings(case) | {"params_dtype": torch.float32})
            chunks = build_model(source, config)
            load_hugging_face(chunks, source, DirectoryWeights(original, source))
            save_hugging_face(chunks, source, Path(folder) / name, max_shard_size=SHARD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("directories")
    for family in FAMILIES:
        small_model(family).float().save_pretrained(made / family)
    mp.spawn(run_process, (str(made),), nprocs=PROCESSES)
    return made


def contents(directory: Path) -> dict[str, torch.Tensor]:
    return {k: t for f in directory.glob("*.safetensors") for k, t in load_file(f).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_comes_back_bit_for_bit_under_its_name(folder: Path, layout: str) -> None:
    before, after = contents(folder / LAYOUTS[layout].work.family), contents(folder / layout)
    assert before.keys() == after.keys()
    assert [name for name, t in before.items() if not torch.equal(t, after[name])] == []
    assert {t.dtype for t in after.values()} == {torch.float32}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_sharded_and_the_library_loads_them(folder: Path, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    files = list((folder / layout).glob("*.safetensors"))
    assert len(files) > 5
    assert max(f.stat().st_size for f in files) < 2 * SHARD
    loaded = AutoModelForCausalLM.from_pretrained(folder / layout, attn_implementation="eager")
    truth = small_model(LAYOUTS[layout].work.family).float().state_dict()
    assert [n for n, t in loaded.state_dict().items() if not torch.equal(t, truth[n])] == []
