"""A Hugging Face causal language model as a policy over rollout trees.

Shapes: R physical rows · D model width · E experts · A vocabulary · P semantic log-prob positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harts.errors import InputError, UnsupportedError
from harts.layout import CompactLayout
from harts.models.experts import expert_modules, group_experts
from harts.models.families import ModelFamily, family_of
from harts.models.group_router import GroupRouter
from harts.models.linear_attention import TreeLayer
from harts.ops.attention import tree_attention
from harts.ops.compilation import only_rows_vary, uncompiled
from harts.ops.kept_outputs import keep_outputs
from harts.ops.logprobs import mapped_logprobs
from harts.ops.router import (
    RouterStatistics,
    TrajectoryRows,
    router_statistics,
    updated_expert_bias,
)
from harts.ops.tree_index import TreeIndex

Recomputation = Literal["none", "selective", "full"]
ATTENTION_NAME = "harts_tree"
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_COMPILED = ("RMSNorm", "MLP", "Attention")
"""How the library names the classes with chains of elementwise work, linear attention aside."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyOutput:
    """What one microbatch gives back to the RL objective."""

    logprobs: Tensor
    """[P] log-prob of each next token, trajectory by trajectory in ``layout.members`` order."""
    router: tuple[RouterStatistics, ...]
    """One a MoE layer, weighted by multiplicity; empty for a dense model."""


class TreePolicy(nn.Module):
    """Runs a prepared model on compact layouts. The model keeps its weights, names and class."""

    model: PreTrainedModel
    top_k: int
    """Experts per token; 0 in a dense model."""

    def __init__(self, model: PreTrainedModel, family: ModelFamily) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self._recorded: list[tuple[Tensor, Tensor]] | None = None
        routers = family.routers(model)
        self.top_k = routers[0].top_k if routers else 0
        for router in routers:
            router.register_forward_hook(self._record)

    def forward(self, layout: CompactLayout, *, sequence_losses: bool = False) -> PolicyOutput:
        """Log-probs of every semantic position and router statistics of one microbatch.

        Args:
            layout: the microbatch.
            sequence_losses: whether the statistics also hold each trajectory's own
                load-balancing loss.

        Raises:
            InputError: the layout was planned for another chunk length, or holds a token id
                outside the model's vocabulary; or the model's attention was set to another
                implementation since it was prepared.
        """
        self._check(layout)
        head = self.model.get_output_embeddings()
        tree = TreeIndex.from_layout(layout, head.weight.device)
        rows = TrajectoryRows.from_layout(layout, head.weight.device) if sequence_losses else None
        with self._recording() as recorded:
            hidden = self.hidden_states(tree)
        return PolicyOutput(
            logprobs=mapped_logprobs(
                hidden, head.weight, tree.target_rows, tree.targets, bias=head.bias
            ),
            router=tuple(
                router_statistics(
                    logits,
                    selected,
                    tree.multiplicity,
                    self.family.router_score,
                    trajectories=rows,
                )
                for logits, selected in recorded
            ),
        )

    def hidden_states(self, tree: TreeIndex) -> Tensor:
        """Run the decoder on compact rows: [R, D] after the final norm."""
        output = self.model.get_decoder()(
            input_ids=tree.tokens.unsqueeze(0),
            position_ids=tree.positions.unsqueeze(0),
            # A mask of four dims is taken as it is: none is built, each layer reads the tree.
            attention_mask=tree.tokens.new_zeros((1, 1, 1, 1)),
            use_cache=False,
            tree=tree,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def update_expert_bias(self, counts: Sequence[Tensor], rate: float) -> None:
        """Balance the experts after a step; see the function of this name."""
        update_expert_bias(self.model, self.family, counts, rate)

    def set_recomputation(
        self,
        kind: Recomputation,
        *,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Which activations backward makes again, from the same plan, to save memory.

        - `none`: all are kept;
        - `full`: every decoder layer keeps its input only;
        - `selective`: it also keeps what its compiled operators cost most to make: the outputs of
          attention, of the delta rule and of the routed experts. The last layer keeps everything,
          since backward needs it before any other memory is taken.

        ``scope`` is entered around each recomputation: torch leaves function modes in backward,
        so one that was active in forward must be named here.
        """
        if kind not in get_args(Recomputation):
            raise InputError(
                f"recomputation must be one of {get_args(Recomputation)}, got {kind!r}"
            )
        self.model.activation_checkpointing_disable()
        if kind == "none":
            return

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if kind == "full":
                return nullcontext(), scope()
            return keep_outputs(scope())

        self.model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        if kind == "selective":
            layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
            layers[-1].gradient_checkpointing = False

    def compile_layers(self, backend: str = "inductor") -> None:
        """Let ``torch.compile`` fuse what lies between matrix products and the tree's operators.

        Norms, gates, rotations, routing and activations are chains of small kernels otherwise.
        Layers of one kind share their compilations, which serve any number of rows; the first step
        of a process pays for them. Results differ by rounding from those without.
        """
        for experts in expert_modules(self.model):
            experts.backend = backend
        for module in self.model.modules():
            if isinstance(module, TreeLayer | GroupRouter):
                module.backend = backend
            elif type(module).__name__.endswith(_COMPILED):
                module.compile(dynamic=True, backend=backend)
            elif type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(_rotations_by_row)

    def _check(self, layout: CompactLayout) -> None:
        chosen = getattr(self.model.config, "_attn_implementation", None)
        if chosen != ATTENTION_NAME:
            raise InputError(
                f"the model's attention implementation must be {ATTENTION_NAME!r}, which prepare "
                f"set, and is {chosen!r}: it would not see the tree. Call "
                f"model.set_attn_implementation({ATTENTION_NAME!r}) before training"
            )
        if layout.chunk_size != self.family.chunk_size:
            raise InputError(
                f"the layout is planned for chunk length {layout.chunk_size}, expected "
                f"{self.family.chunk_size} for {self.family.model_type}; plan with --chunk-size "
                f"{self.family.chunk_size}"
            )
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if int(layout.tokens.max()) >= vocabulary:
            raise InputError(
                f"token id {int(layout.tokens.max())} is outside the model's vocabulary of "
                f"{vocabulary}; use the tokenizer of this model or a model with a larger vocabulary"
            )

    @contextmanager
    def _recording(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Collect router outputs of one forward; recomputation in backward adds nothing."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _record(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self._recorded is not None:
            logits, _, selected = output
            self._recorded.append((logits, selected))


def prepare(model: PreTrainedModel) -> TreePolicy:
    """Make a Hugging Face causal language model run on rollout trees.

    The model is changed in place through the library's own extension points: its attention
    implementation and that of its routed experts are set to registered ones, its linear-attention
    layers become subclasses of their class, and its routers get a forward hook. Weights and their
    names stay; without a tree the model runs, generates and saves as before.

    Raises:
        UnsupportedError: no adapter for this model, a setting that trees cannot have, or it is
            prepared already.
    """
    family = family_of(model)
    _refuse_dropout(model)
    _refuse_windows(model)
    _refuse_positions_by_length(model)
    if getattr(model.config, "_attn_implementation", None) == ATTENTION_NAME:
        raise UnsupportedError("this model is prepared already; use the first TreePolicy")
    tree_classes = {**family.tree_layers, **family.tree_routers}
    for module in model.modules():
        tree_class = tree_classes.get(type(module))
        if tree_class is not None:
            module.__class__ = tree_class
    model.set_attn_implementation(ATTENTION_NAME)
    group_experts(model)
    return TreePolicy(model, family)


def _refuse_dropout(model: PreTrainedModel) -> None:
    """A shared row would draw one mask for all of its trajectories, which no training does."""
    used = {
        name: value
        for name, value in model.config.to_dict().items()
        if name.endswith("dropout") and isinstance(value, float) and value > 0
    }
    used.update(
        (name, module.p)
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    )
    if used:
        raise UnsupportedError(
            f"dropout must be 0 on rollout trees, since a shared token would draw one mask for all "
            f"of its trajectories; got {used}. Set it to 0 in the model's configuration."
        )


def _refuse_windows(model: PreTrainedModel) -> None:
    """Tree attention sees every ancestor."""
    kinds = set(getattr(model.config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "linear_attention"})
    window = getattr(model.config, "sliding_window", None)
    if other or window is not None:
        raise UnsupportedError(
            "attention with a window is not supported on rollout trees; got layer types "
            f"{other or sorted(kinds)} and sliding_window={window}. Use a model, or set "
            "use_sliding_window=False in its configuration, whose attention sees every token."
        )


def _refuse_positions_by_length(model: PreTrainedModel) -> None:
    """A row shared by a short and a long trajectory would need two rotary embeddings."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _ROPE_BY_LENGTH:
        raise UnsupportedError(
            f"rope_type {rope['rope_type']!r} turns positions by the length of the whole sequence, "
            "so trajectories of different length share no row. Set another rope_type, such as "
            "'yarn', in the model's configuration."
        )


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, family: ModelFamily, counts: Sequence[Tensor], rate: float
) -> None:
    """Move every router's balancing bias by ``rate`` against its load over the whole step.

    Args:
        model: a model of ``family``, prepared or not.
        family: names the bias; a family without one is left as it is.
        counts: [E] multiplicity-weighted assignment counts, one a MoE layer, summed over all
            microbatches and replicas.
        rate: step of the bias.
    """
    if family.expert_bias is None:
        return
    for router, load in zip(family.routers(model), counts, strict=True):
        bias: Tensor = getattr(router, family.expert_bias)
        bias.copy_(updated_expert_bias(bias, load.to(bias.device), rate))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree: TreeIndex | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: [1, H, R, K] heads to [1, R, H, V] outputs."""
    if tree is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    return _heads_on_tree(query, key, value, index=tree, scale=scaling), None


def _rotations_by_row(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
    for part in output:
        only_rows_vary(part, rows_dim=1)


def _on_tree(
    query: Tensor, key: Tensor, value: Tensor, *, index: TreeIndex, scale: float
) -> Tensor:
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    return tree_attention(*rows, index=index, scale=scale).unsqueeze(0)


_heads_on_tree = uncompiled(_on_tree, rows_dim=1)

# At import, so that a process that only unpickles a policy has them too.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)
