"""The truth does not depend on which packages are installed."""

import functools
import sys

import pytest
import torch

from harts.fidelity import logprobs_alone
from harts.models.families import family_named
from tests.training.runs import rollouts


@pytest.mark.parametrize(
    "name",
    [
        "bailing_hybrid",
        "kimi_linear",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "olmo_hybrid",
    ],
)
def test_the_truth_runs_in_pytorch_where_faster_packages_are_installed(monkeypatch, name):
    family = family_named(name)
    model = family.small_model(64).double()
    batch = rollouts(trees=1, tries=2)
    expected = logprobs_alone(model, family, batch)

    def package(torch_function):
        @functools.wraps(torch_function)
        def wrapped(*_args, **_kwargs):
            raise AssertionError("the package was called")

        return wrapped

    for layer in family.tree_layers:
        library = sys.modules[layer.__module__]
        for function in [n for n in vars(library) if n.startswith(("torch_chunk", "chunk_kimi"))]:
            wrapper = getattr(library, function)
            monkeypatch.setattr(library, function, package(wrapper.__wrapped__))
    with pytest.raises(AssertionError, match="the package was called"):
        model(torch.arange(10).unsqueeze(0))
    assert torch.equal(logprobs_alone(model, family, batch), expected)
    with pytest.raises(AssertionError, match="the package was called"):
        model(torch.arange(10).unsqueeze(0))
