"""How a run on Megatron spreads over processes, and what must hold before it starts them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec

from harts.errors import InputError

LAUNCH = "torchrun --nproc-per-node 8 --no-python harts train CONFIG.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Parallel sizes of ``engine: megatron``; what they leave of the processes are replicas."""

    tensor_parallel: int = 1
    """GPUs that share each layer's matrices, with sequence parallelism between them."""
    pipeline_parallel: int = 1
    """Stages of layers, a microbatch in each."""
    virtual_stages: int | None = None
    """Groups of layers a GPU, interleaved over the pipeline."""
    context_parallel: int = 1
    """GPUs that share each microbatch's rows, and heads in the attention cores (Ulysses)."""
    expert_parallel: int = 1
    """GPUs over which experts are shared out, among those of a pipeline stage."""
    expert_tensor_parallel: int = 1
    """GPUs that share each expert's matrices."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and size < 1:
                raise InputError(f"{field.name} must be at least 1, got {size}")

    @property
    def model_processes(self) -> int:
        """Processes of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def replicas(self, processes: int) -> int:
        """Replicas that ``processes`` make up.

        Raises:
            InputError: they do not, or experts cannot be shared out over a stage's processes.
        """
        if processes % self.model_processes:
            raise InputError(
                f"megatron: {processes} processes cannot be shared out into replicas of "
                f"tensor_parallel {self.tensor_parallel} x pipeline_parallel "
                f"{self.pipeline_parallel} x context_parallel {self.context_parallel} = "
                f"{self.model_processes}; start a multiple of {self.model_processes} with "
                "torchrun (nodes times --nproc-per-node), or change the sizes"
            )
        stage = processes // self.pipeline_parallel
        experts = self.expert_parallel * self.expert_tensor_parallel
        if stage % experts:
            raise InputError(
                f"megatron: expert_parallel {self.expert_parallel} x expert_tensor_parallel "
                f"{self.expert_tensor_parallel} = {experts} does not divide the {stage} processes "
                "of a pipeline stage; change the sizes"
            )
        return processes // self.model_processes


def check_launch(sizes: MegatronConfig, environment: Mapping[str, str]) -> None:
    """Refuse to start a run on Megatron that cannot work.

    Args:
        sizes: of the configuration.
        environment: variables of this process.

    Raises:
        InputError: Megatron is not installed, torchrun did not start this process, or the number
            of processes does not fit.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise InputError(
            "engine: megatron needs megatron-core, which is not installed; pip install "
            "'harts[megatron]', or use engine: huggingface"
        )
    if "WORLD_SIZE" not in environment or "RANK" not in environment:
        raise InputError(
            "engine: megatron runs one process a GPU, and this one was started alone; start them "
            f"with torchrun, for example: {LAUNCH}"
        )
    sizes.replicas(int(environment["WORLD_SIZE"]))
