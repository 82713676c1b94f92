"""The bailing_hybrid adapter: the library's model in every respect but one, that it runs trees."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from harts.errors import InputError, UnsupportedError
from harts.fidelity import float64_everywhere
from harts.layout import build_layout
from harts.models import prepare
from harts.models.bailing_hybrid import FAMILY, small_model
from harts.ops.tree_index import TreeIndex
from tests.forests import batch_of, lay_out

VOCABULARY = 40


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return small_model(VOCABULARY).eval()


TREE = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 8, 8, 8, 8], [30]]


def test_weights_names_and_class_stay(model: PreTrainedModel) -> None:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    policy = prepare(model)
    after = policy.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert type(policy.model).__name__ == "BailingHybridForCausalLM"


def test_without_a_tree_the_prepared_model_runs_and_generates_as_before(
    model: PreTrainedModel,
) -> None:
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    prepared = prepare(model).model
    tokens = torch.randint(0, VOCABULARY, (2, 70))
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            expected = plain(input_ids=tokens, **options).logits
            found = prepared(input_ids=tokens, **options).logits
            # A token's experts are added in another order.
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        made = [
            m.generate(
                tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None
            )
            for m in (plain, prepared)
        ]
    assert torch.equal(*made)


def test_a_saved_prepared_model_loads_as_a_plain_library_model(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    policy = prepare(model)
    policy.model.save_pretrained(tmp_path)
    assert "harts" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in model.state_dict().items())


def test_a_default_attention_mask_never_overrides_the_tree(model: PreTrainedModel) -> None:
    """Peers' fault 5: an all-ones mask made by default took precedence over packed bounds."""
    policy = prepare(model)
    seen: list[Any] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _m, _a, kwargs: seen.append((kwargs["attention_mask"], kwargs["tree"])),
            with_kwargs=True,
        )
    _, _, layout = lay_out(batch_of(TREE), chunk_size=64)
    policy(layout)
    assert len(seen) == 4
    linear, full = seen[:3], seen[3]
    assert all(mask is None for mask, _ in linear)
    assert full[0].shape == (1, 1, 1, 1), "a placeholder, which the tree's attention never reads"
    assert all(isinstance(tree, TreeIndex) for _, tree in seen)


def test_routing_is_the_same_so_numerics_are_compared_like_for_like(
    model: PreTrainedModel,
) -> None:
    """Peers' fault 12: comparing under different routing hides or invents errors."""
    model = model.double()
    plain = copy.deepcopy(model)
    policy = prepare(model)
    batch = batch_of(TREE)
    _, _, layout = lay_out(batch, chunk_size=64)
    chosen: dict[str, list[Tensor]] = {"tree": [], "alone": []}
    for name, which in (("tree", policy.model), ("alone", plain)):
        for module in which.modules():
            if isinstance(module, FAMILY.router_class):
                module.register_forward_hook(
                    lambda _m, _i, out, name=name: chosen[name].append(out[2].sort(-1).values)
                )
    with float64_everywhere(), torch.no_grad():
        policy(layout)
        for i, row in enumerate(layout.members.tolist()):
            chosen["alone"].clear()
            tokens = torch.from_numpy(batch.trajectory(row).astype("int64"))
            plain(input_ids=tokens.unsqueeze(0), use_cache=False)
            rows = layout.member_rows[layout.member_offsets[i] : layout.member_offsets[i + 1]]
            for tree, alone in zip(chosen["tree"], chosen["alone"], strict=True):
                assert torch.equal(tree[torch.from_numpy(rows)], alone)


def test_padded_rows_change_nothing_and_count_nowhere(model: PreTrainedModel) -> None:
    """Peers' faults 4 and 11: padded tails are written, and no statistic sees them."""
    policy = prepare(model.double())
    batch = batch_of(TREE)
    forest, calls, plain = lay_out(batch, chunk_size=64)
    padded = build_layout(batch, forest, calls, row_multiple=32)
    assert padded.rows > plain.rows
    losses = []
    for layout in (plain, padded):
        policy.zero_grad()
        with float64_everywhere():
            output = policy(layout)
            router = sum(s.z_sum + s.mass.square().sum() for s in output.router)
            torch.autograd.backward(output.logprobs.sum() + router)
        losses.append((output, [p.grad.clone() for p in policy.parameters()]))
    (a, grads_a), (b, grads_b) = losses
    torch.testing.assert_close(a.logprobs, b.logprobs)
    for x, y in zip(a.router, b.router, strict=True):
        assert torch.equal(x.counts, y.counts)
        assert x.tokens == y.tokens == sum(map(len, TREE))
    for x, y in zip(grads_a, grads_b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_bfloat16_runs_and_stays_near_float32(model: PreTrainedModel) -> None:
    _, _, layout = lay_out(batch_of(TREE), chunk_size=64)
    with torch.no_grad():
        exact = prepare(copy.deepcopy(model))(layout).logprobs
        rough = prepare(model.to(torch.bfloat16))(layout).logprobs
    assert rough.dtype == torch.float32
    # A row whose experts change under rounding differs by more: the median is not one of them.
    assert float((rough - exact).abs().median()) < 0.05


def test_dropout_is_refused_since_a_shared_row_would_draw_one_mask(model: PreTrainedModel) -> None:
    model.config.attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match=r"dropout must be 0.*attention_dropout.*0\.1"):
        prepare(model)


def test_preparing_twice_is_refused(model: PreTrainedModel) -> None:
    policy = prepare(model)
    with pytest.raises(UnsupportedError, match="prepared already"):
        prepare(policy.model)


def test_a_layout_for_another_chunk_length_is_refused(model: PreTrainedModel) -> None:
    _, _, layout = lay_out(batch_of(TREE), chunk_size=32)
    with pytest.raises(InputError, match=r"chunk length 32, expected 64.*--chunk-size 64"):
        prepare(model)(layout)


def test_a_token_beyond_the_vocabulary_is_refused(model: PreTrainedModel) -> None:
    _, _, layout = lay_out(batch_of([[1, VOCABULARY]]), chunk_size=64)
    with pytest.raises(InputError, match=f"token id {VOCABULARY} is outside.*{VOCABULARY}"):
        prepare(model)(layout)
