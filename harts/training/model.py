"""The model of a run: made from a configuration, or loaded from a directory.

Shapes: A vocabulary.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from harts.errors import InputError
from harts.fidelity import float64_everywhere
from harts.models.families import family_named
from harts.training.naming import nearest

Precision = Literal["float32", "bfloat16", "float64"]
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model family with the fields of its library configuration, or a local model directory."""

    model_type: str | None = None
    """A family that HARTS supports, for a model with fresh random weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the family's ``transformers`` configuration; others keep the library's default."""
    path: str | None = None
    """A directory that ``save_pretrained`` wrote, for trained weights."""
    dtype: Precision = "float32"
    """Of the weights. Layers that the library keeps in float32 stay there under bfloat16."""
    seed: int = 0
    """Seed of fresh weights."""

    def __post_init__(self) -> None:
        if (self.model_type is None) == (self.path is None):
            raise InputError(
                "expected either model_type or path, "
                f"got {'neither' if self.path is None else 'both'}. Name a family for fresh "
                "weights or a directory for trained ones."
            )
        if self.path is not None and self.config:
            raise InputError(
                "config is only for a fresh model; a model directory brings its own config.json. "
                "Remove config or path."
            )
        if self.dtype not in get_args(Precision):
            raise InputError(f"dtype must be one of {get_args(Precision)}, got {self.dtype!r}")


def build_model(config: ModelConfig) -> PreTrainedModel:
    """The library's model, in training mode, not yet prepared for trees.

    It is made on torch's default device. A run makes it on the CPU and moves it, since generators
    of other devices draw other weights from the same seed.

    Raises:
        InputError: a configuration field is unknown or has a bad value; no such directory.
        UnsupportedError: HARTS has no adapter for the family.
    """
    if config.path is not None:
        return load_model(Path(config.path), config.dtype)
    assert config.model_type is not None
    library_config = _library_config(config.model_type, config.config)
    wide = config.dtype == "float64"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = _from_config(library_config, "float32" if wide else config.dtype)
    # Rounded to float32 first, float64 training starts from the same weights as float32 training.
    return (model.double() if wide else model).train()


def load_model(directory: Path, dtype: Precision) -> PreTrainedModel:
    """A model that ``save_pretrained`` wrote, in training mode, not yet prepared for trees.

    Raises:
        InputError: not a model directory, or weights are missing or unreadable.
        UnsupportedError: HARTS has no adapter for the family.
    """
    _check_directory(directory)
    if not any((directory / name).is_file() for name in _WEIGHTS):
        raise InputError(
            f"expected the weights {_WEIGHTS[0]} (or {_WEIGHTS[1]} and its parts) in {directory}, "
            "found neither; give a complete model directory"
        )
    try:
        # Under float64 the library must not narrow the layers it wants in float32.
        with numerics(dtype):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                experts_implementation="eager",
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise InputError(
            f"the weights in {_unreadable(directory)} are corrupt or cut off: {_one_line(error)}"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise InputError(f"cannot load a model from {directory}: {_one_line(error)}") from error
    model: PreTrainedModel
    model, report = loaded
    if report["missing_keys"]:
        raise InputError(
            f"{directory} lacks {len(report['missing_keys'])} weights of {type(model).__name__}, "
            f"first {min(report['missing_keys'])!r}; give a complete model directory"
        )
    return model.train()


def library_config(config: ModelConfig) -> PretrainedConfig:
    """The library's configuration of the model, without making it.

    Raises:
        InputError: a configuration field is unknown or has a bad value; no such directory.
        UnsupportedError: HARTS has no adapter for the family.
    """
    if config.path is None:
        assert config.model_type is not None
        return _library_config(config.model_type, config.config)
    _check_directory(Path(config.path))
    try:
        read: PretrainedConfig = AutoConfig.from_pretrained(config.path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"cannot read {config.path}/config.json: {_one_line(error)}") from error
    return read


def _check_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise InputError(
            f"expected a model directory with a config.json at {directory}, found none. HARTS does "
            "not download models: give model.path a local directory."
        )
    family_named(_model_type(directory))


def _model_type(directory: Path) -> str:
    file = directory / "config.json"
    try:
        return str(json.loads(file.read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"expected a model configuration with a model_type in {file}: {_one_line(error)}"
        ) from error


def _unreadable(directory: Path) -> Path:
    """The first file of weights that cannot be opened, or the directory."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return directory


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy of a model, prepared or not, as the library makes it: the side of the truth.

    Call it, and use the copy, inside ``float64_everywhere``.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    copy = _from_config(config, "float32", attention="eager").double()
    copy.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return copy.train()


def vocabulary_of(model: PreTrainedModel) -> int:
    """A: how many token ids the model embeds."""
    return int(model.get_input_embeddings().weight.shape[0])


@contextlib.contextmanager
def numerics(dtype: Precision) -> Iterator[None]:
    """The scope in which a model of this type loads and runs: float64 must not be narrowed."""
    with float64_everywhere() if dtype == "float64" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """No progress bars or warnings of ``transformers`` inside: a run shows its own.

    What matters of the warnings, missing weights and fields out of range, is an error here.
    """
    shown, verbosity = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


def _library_config(model_type: str, fields: dict[str, Any]) -> PretrainedConfig:
    family_named(model_type)
    defaults = AutoConfig.for_model(model_type)
    known = {*defaults.to_dict(), *defaults.attribute_map}
    for name in fields:
        if name not in known:
            raise InputError(
                f"model.config.{name} is not a field of {type(defaults).__name__}; the nearest is "
                f"{nearest(name, known)!r}"
            )
    # The family's own special tokens do not exist in a smaller vocabulary.
    vocabulary = fields.get("vocab_size", defaults.vocab_size)
    tokens = {name: getattr(defaults, name) for name in _SPECIAL_TOKENS}
    absent = {n: None for n, t in tokens.items() if isinstance(t, int) and t >= vocabulary}
    try:
        config = AutoConfig.for_model(model_type, **(absent | fields))
    except Exception as error:  # the library raises a dozen unrelated classes here
        raise InputError(f"model.config: {_one_line(error)}") from error
    return config


def _from_config(
    config: PretrainedConfig, dtype: Precision, *, attention: str | None = None
) -> PreTrainedModel:
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), experts_implementation="eager", **chosen
        )
    except Exception as error:  # whatever the layers raise for sizes that do not fit
        raise InputError(
            f"no {config.model_type} model can be made from this model.config: {_one_line(error)}"
        ) from error
    return model


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
