"""The configuration of a training run: a YAML file, ``key=value`` overrides, typed sections.

Each section is a frozen record beside the code that it configures; it refuses bad values itself.
This module adds where in the file a value stands.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harts.errors import HartsError, InputError
from harts.models import Recomputation
from harts.objectives import GRPO, PPO
from harts.planning.step import Planner
from harts.training.comparison import ComparisonConfig
from harts.training.data import DataConfig
from harts.training.device import DeviceChoice
from harts.training.model import ModelConfig
from harts.training.naming import nearest
from harts.training.optimizer import OptimizerConfig, ScheduleConfig
from harts.training.parallel import MegatronConfig
from harts.training.step import BalancingForm, RouterLosses

Section = TypeVar("Section")
Engine = Literal["huggingface", "megatron"]
OBJECTIVES: Mapping[str, type[GRPO] | type[PPO]] = {"grpo": GRPO, "ppo": PPO}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """How the trajectories of a step are shared out."""

    replicas: int = 1
    """Data-parallel replicas; engine: huggingface runs them one after the other in one process,
    with engine: megatron the processes and parallel sizes say how many there are."""
    capacity: int = 4096
    """Compact tokens that one microbatch may hold; the longest trajectory must fit."""
    planner: Planner = "best"
    fillers: bool = False
    """Where no number of microbatches fits the replicas, such as with fewer trajectories than
    replicas, repeat a short trajectory with weight zero; otherwise such a step is an error."""
    background: bool = True
    """Plan each step in another process while the step before trains, where planning takes long
    enough for that to be worth a process."""

    def __post_init__(self) -> None:
        for name in ("replicas", "capacity"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How the load of the experts is balanced; a dense model ignores it."""

    z_coefficient: float = 0.0
    load_balancing_coefficient: float = 0.0
    load_balancing: BalancingForm = "microbatch"
    """Over which tokens the load is averaged: a microbatch's, each trajectory's, or the step's."""
    expert_bias_rate: float = 0.0
    """How far each step moves an expert's selection bias against its load; 0 leaves it."""

    def __post_init__(self) -> None:
        _ = self.losses  # refuses what they refuse
        if not self.expert_bias_rate >= 0:
            raise InputError(f"expert_bias_rate must be at least 0, got {self.expert_bias_rate}")

    @property
    def losses(self) -> RouterLosses:
        """The two losses that a step adds to the policy loss."""
        return RouterLosses(
            z_coefficient=self.z_coefficient,
            load_balancing_coefficient=self.load_balancing_coefficient,
            load_balancing=self.load_balancing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a configuration that stand outside its sections."""

    engine: Engine = "huggingface"
    """huggingface: one process. megatron: one process a GPU, started by torchrun."""
    device: DeviceChoice = "auto"
    """auto: a GPU if PyTorch sees one, else the CPU. A run that was stopped may go on elsewhere.
    With engine: megatron each process takes the GPU that torchrun gives it."""
    compile: bool = False
    """On a GPU, fuse what lies between matrix products with torch.compile: faster steps after a
    slow first one. Which numbers come out then depends on the shapes compiled before, so a run
    that was stopped goes on to the same numbers only up to rounding."""
    steps: int = 100
    """Optimiser steps of the whole run."""
    trees_per_step: int = 4
    """Rollout trees that one step draws, with all of their trajectories."""
    seed: int = 0
    """Seed of the order of the trees, and of torch and NumPy."""
    recompute: Recomputation = "none"
    """Activations that backward makes again, for less memory; see `TreePolicy.set_recomputation`.
    Engine megatron: none or full."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    output: str | None = None
    """The run directory; by default runs/ and the name of the configuration file, followed by that
    of the data file where an override gives one."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in the run directory, if it has one. never: start
    afresh, an earlier run is moved aside. Anything else: the checkpoint directory to go on from."""

    def __post_init__(self) -> None:
        for name in ("steps", "trees_per_step", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.engine == "megatron" and self.recompute == "selective":
            raise InputError(
                "with engine: megatron expected recompute: none or full, got selective, which "
                "engine: huggingface alone has"
            )
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        if self.engine == "megatron" and self.device == "cpu":
            raise InputError(
                "device must be auto or cuda with engine: megatron, which runs on the GPUs that "
                "torchrun gives it; got cpu. Leave device out, or use engine: huggingface"
            )
        if self.engine == "megatron" and self.compile:
            raise InputError(
                "compile must be false with engine: megatron, whose layers are Megatron's; got "
                "true. Leave compile out, or use engine: huggingface"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunConfig):
    """Everything that decides a run."""

    data: DataConfig
    model: ModelConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    objective: GRPO | PPO = field(default_factory=GRPO)
    router: RouterConfig = field(default_factory=RouterConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.output or "runs/train")

    def as_mapping(self) -> dict[str, Any]:
        """What ``to_config`` turns into this record again; plain values, every default spelled."""
        values = dataclasses.asdict(self)
        name = next(name for name, cls in OBJECTIVES.items() if type(self.objective) is cls)
        values["objective"] = {"name": name, **values["objective"]}
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def as_yaml(self) -> str:
        """The resolved configuration, as ``harts train`` reads it."""
        return OmegaConf.to_yaml(OmegaConf.create(self.as_mapping()))


_SECTIONS: Mapping[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "plan": PlanConfig,
    "router": RouterConfig,
    "megatron": MegatronConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "comparison": ComparisonConfig,
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply ``key=value`` overrides, nested keys with dots.

    Raises:
        InputError: unreadable file, unknown key or bad value; the message names the key.
    """
    try:
        loaded = OmegaConf.load(path)
        changes = [_with_files(_override(text)) for text in overrides]
        written = _with_files(OmegaConf.to_container(loaded, resolve=False))
        written = _without_replaced_model(written, changes)
        merged = OmegaConf.to_container(OmegaConf.merge(written, *changes), resolve=True)
    except OSError as error:
        raise InputError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a valid configuration: {error}") from error
    values = cast(dict[str, Any], merged)
    config = to_config(values)
    if config.output is not None:
        return config
    # Two data files through one configuration are two runs.
    other_data = config.data.files[:1] if any("data" in change for change in changes) else []
    name = "-".join([path.stem, *(Path(file).stem for file in other_data)])
    return dataclasses.replace(config, output=str(Path("runs") / name))


def to_config(values: Mapping[str, Any]) -> TrainConfig:
    """The typed configuration of a plain mapping.

    Raises:
        InputError: unknown key, bad value or missing section; the message names the key.
    """
    run = _field_types(RunConfig)
    for key in values:
        _check_known(str(key), {*run, *_SECTIONS, "objective"}, "")
    options = _section(RunConfig, {k: v for k, v in values.items() if k in run}, "")
    sections: dict[str, Any] = {
        k: _section(cls, values.get(k), f"{k}.") for k, cls in _SECTIONS.items()
    }
    if options.engine != "megatron" and sections["megatron"] != MegatronConfig():
        raise InputError(
            f"expected engine: megatron beside the section megatron, got engine: {options.engine}, "
            "which would ignore its sizes. Set engine: megatron, or leave the section out"
        )
    return TrainConfig(
        **{name: getattr(options, name) for name in run},
        **sections,
        objective=_objective(values.get("objective")),
    )


def _override(text: str) -> dict[str, Any]:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise InputError(
            f"expected an override key=value, got {text!r}; for example "
            "optimizer.learning_rate=1e-3 or data=rollouts.jsonl"
        )
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist([text])))


def _with_files(values: Any) -> dict[str, Any]:
    """Spell out ``data: FILE`` and ``data: [FILE, ...]``; files and presets replace each other."""
    if not isinstance(values, dict):
        raise InputError(
            f"expected a configuration with key: value lines, got {type(values).__name__}"
        )
    data = values.get("data")
    if isinstance(data, str):
        data = [data]
    if isinstance(data, list):
        return {**values, "data": {"files": data, "preset": None}}
    if isinstance(data, dict):
        for given, other, empty in (("files", "preset", None), ("preset", "files", [])):
            if data.get(given) and other not in data:
                return {**values, "data": {other: empty, **data}}
    return values


def _without_replaced_model(
    written: dict[str, Any], changes: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The file's settings, less those of a model that an override replaces by another source."""
    model = written.get("model")
    given = {
        key: value
        for change in changes
        if isinstance(change.get("model"), dict)
        for key, value in change["model"].items()
    }
    if not isinstance(model, dict):
        return written
    replaced: set[str] = set()
    if given.get("path") is not None:
        replaced |= {"model_type", "config"}
    if given.get("model_type") is not None:
        replaced |= {"path"}
    return {**written, "model": {k: v for k, v in model.items() if k not in replaced}}


def _objective(values: Any) -> GRPO | PPO:
    given = _mapping(values, "objective.")
    name = given.pop("name", "grpo")
    if name not in OBJECTIVES:
        raise InputError(f"objective.name must be one of {sorted(OBJECTIVES)}, got {name!r}")
    return _section(OBJECTIVES[name], given, "objective.")


def _section(cls: type[Section], values: Any, where: str) -> Section:
    """One section as its record; ``where`` is its prefix in messages, such as "optimizer."."""
    given = _mapping(values, where)
    expected = _field_types(cls)
    for key in given:
        _check_known(str(key), expected, where)
    merged = OmegaConf.structured(cls)
    for key, value in given.items():
        try:
            merged = OmegaConf.merge(merged, {key: value})
        except OmegaConfBaseException as error:
            raise InputError(
                f"{where}{key}: expected {_describe(expected[key])}, got {value!r}"
            ) from error
    try:
        return cast(Section, OmegaConf.to_object(merged))
    except HartsError as error:
        raise type(error)(f"{where.rstrip('.')}: {error}" if where else str(error)) from error


def _mapping(values: Any, where: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{where.rstrip('.')}: expected a section of keys, got {values!r}")
    return dict(values)


def _check_known(key: str, valid: Mapping[str, object] | set[str], where: str) -> None:
    if key not in valid:
        raise InputError(
            f"unknown key {where}{key}; the nearest is {where}{nearest(key, valid)}. "
            f"Known here: {', '.join(sorted(valid))}"
        )


def _field_types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    list: "a list",
    dict: "a section of keys",
}


def _describe(hint: Any) -> str:
    """A type in words, for messages."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a) for a in arguments)
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    return _WORDS.get(origin or hint, str(hint))
