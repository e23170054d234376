"""Build small modules from the files in `conf/`, and helpers for tests of them.

A new file in `conf/attn`, `conf/part` or `conf/position` is tested without being named here. A
variant may be a mechanism with parts, such as `gqa+gate+sink`.
"""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache, lru_cache, reduce
from operator import getitem
from typing import Any, get_args

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptattn.attention import Attention
from gptattn.build.model import add_parts, build_model, list_parts, shared_arguments
from gptattn.model.gpt import GPT
from gptattn.position import HeadPosition
from gptattn.settings.compose import CONF, from_hydra
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.construct import arguments_of, construct, find_target
from gptattn.settings.values import build_dataclass


def menu(group: str) -> list[str]:
    """The names of the files in one folder of `conf/`."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def slow_but(quick: Collection[Any], values: Sequence[Any]) -> list[Any]:
    """All values, of which `make test` tries only the quick ones."""
    assert {*quick} <= {*values}
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


# Six heads allow groups of two and of three. The head size 5 and the context 11 are primes.
SMALL = (
    "model.num_layers=2",
    "model.num_heads=6",
    "model.d_model=30",
    "model.context_length=11",
    "model.dropout=0.0",
    "model.qkv_bias=true",
)

# Settings that choose no file and that no file refers to.
PLAIN = re.compile(
    r"((model|block|optim|budget|validation|sample|trainer)\.\w|data\.path=|"
    r"(seed|batch_size|accumulate|loss_chunk_tokens|log_every|checkpoint|cache_dir|"
    r"experiment_name|shared_init)=)"
)
LAYER = ("attn", "position", "part")  # the groups whose files no other file refers to
OF_LAYER = re.compile(r"(attn|position|part)(\.[\w.]+)?=")
# What reads these files itself.
NOT_PLAIN = ("pattern=", "recipe=", "experiment=", "match=", "hydra.", "+", "~")
PARSER = OverridesParser.create()

# What the contract is tested on. The parts are tested on one mechanism with shared keys and values;
# on the others, in random combinations.
CONTRACT = [*menu("attn"), *(f"gqa+{part}" for part in menu("part"))]


def mechanism_of(variant: str) -> str:
    """`gqa` of `gqa+gate+sink`."""
    return variant.partition("+")[0]


def parts_of(variant: str) -> list[str]:
    """`gate` and `sink` of `gqa+gate+sink`."""
    return variant.split("+")[1:]


def chosen(variant: str) -> list[str]:
    """The overrides that choose a variant with its parts."""
    parts = parts_of(variant)
    listed = parts[0] if len(parts) == 1 else f"[{','.join(parts)}]"
    return [f"attn={mechanism_of(variant)}", *([f"part={listed}"] if parts else [])]


@lru_cache
def _compose(*overrides: str) -> TrainConfig:
    """The settings of these overrides, not checked."""
    is_within = GlobalHydra.instance().is_initialized()  # a sweep's launcher composes, too
    with nullcontext() if is_within else initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [*overrides], return_hydra_config=True)
        return from_hydra(cfg, cfg.hydra)


@lru_cache
def settings(*overrides: str) -> TrainConfig:
    """The settings of these overrides. Do not modify them: the cached object is shared.

    Hydra takes a fifth of a second to compose. It composes what is left without plain values and
    the files of one layer; these are put in afterwards.
    """
    typed = PARSER.parse_overrides([o for o in overrides if PLAIN.match(o) or OF_LAYER.match(o)])
    if any(o.startswith(NOT_PLAIN) for o in overrides):
        typed = [one for one in typed if PLAIN.match(str(one.input_line))]
    put = {str(one.input_line) for one in typed}
    node = asdict(_compose(*(o for o in overrides if o not in put)))
    for one in sorted(typed, key=lambda one: "." in one.key_or_group):  # first the files
        key, value = one.key_or_group, one.value()
        if key == "part":
            names = value if isinstance(value, list) else [value]
            node["part"] = {name: read_file("part", name) for name in names}
        elif key in LAYER:
            node[key], node["choices"][key] = read_file(key, value), value
        else:
            *groups, name = key.split(".")
            reduce(getitem, groups, node)[name] = value
    node["overrides"] = [o for o in overrides if not o.startswith(("seed=", "run_dir="))]
    cfg = build_dataclass(TrainConfig, node)
    check(cfg)
    return cfg


@cache
def _read_file(group: str, name: str) -> dict[str, Any]:
    found = OmegaConf.load(CONF / group / f"{name}.yaml")
    return OmegaConf.to_container(found)


def read_file(group: str, name: str) -> dict[str, Any]:
    """What a file in `conf/attn`, `conf/part` or `conf/position` says."""
    return dict(_read_file(group, name))


def build_attention(variant: str, **overrides: Any) -> Attention:
    """One layer of a variant, built from its YAML at the sizes of SMALL, without positions.

    `overrides` replace arguments of the constructor, those from the model as well as those in the
    YAML. A mechanism that does not call `attend` ignores the backends `reference` and `sdpa`.
    """
    cfg = settings(f"attn={mechanism_of(variant)}", *SMALL)
    shared = shared_arguments(cfg) | {
        "position": None,
        "layer": 0,
        "backend": "sdpa",
    }
    spec = dict(cfg.attn)
    for name, value in overrides.items():
        types = arguments_of(find_target("attn", spec, [])).types
        if value in ("reference", "sdpa") and "chunked" in get_args(types.get(name)):
            continue
        (spec if name in spec or name not in shared else shared)[name] = value
    attention = construct("attn", spec, shared, cfg.allow_targets)
    if parts := parts_of(variant):
        add_parts(attention, {name: read_file("part", name) for name in parts}, layer=0)
        disturb(attention, std=0.3)
    return attention


def class_of(group: str, name: str) -> Any:
    """The class that a file in `conf/attn`, `conf/part` or `conf/position` names."""
    return find_target(group, read_file(group, name), [])


def takes(variant: str, argument: str) -> bool:
    """Whether the variant's constructor has this argument."""
    return argument in arguments_of(class_of("attn", mechanism_of(variant))).types


def acts_in_heads(position: str) -> bool:
    """Whether this choice of `position` acts in the attention, and not on the embeddings."""
    named = "_target_" in read_file("position", position)
    return named and issubclass(class_of("position", position), HeadPosition)


def refused(part: str) -> Collection[str]:
    """The names of parts and positions that this part refuses beside it."""
    return class_of("part", part).refuses.keys()


@cache
def fits(mechanism: str, part: str) -> bool:
    """Whether the mechanism takes this part: not each has keys and values that one can change."""
    attention = build_attention(mechanism)
    add_parts(attention, {part: read_file("part", part)}, layer=0)
    return part in list_parts(attention)


def build_gpt(*overrides: str, vocab_size: int = 13, std: float | None = None) -> GPT:
    """The GPT of these overrides, with the sizes of SMALL as defaults.

    `std` adds N(0, std) noise to every parameter, so that biases and gains affect the output too.
    """
    model = build_model(settings(*SMALL, *overrides), vocab_size)
    if std is not None:
        disturb(model, std)
    return model


@torch.no_grad()
def disturb(module: nn.Module, std: float) -> None:
    """Add N(0, std) noise to every parameter, so that gains of 1 and biases of 0 act too."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=std)


def through_cache(
    step: Callable[[Tensor, Any], Tensor], x: Tensor, cache: Any, chunks: Sequence[int]
) -> Tensor:
    """Call `step(chunk of x, cache)` for each chunk of tokens; the outputs, joined."""
    assert sum(chunks) == x.shape[1]
    return torch.cat([step(part, cache) for part in x.split(list(chunks), dim=1)], dim=1)


class Allocations(TorchDispatchMode):
    """Records the elements of every tensor allocated in this context; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id_of_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id_of_memory(tensor) not in given:
                self.bytes += tensor.untyped_storage().nbytes()
                self.elements.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def id_of_memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
