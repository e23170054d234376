"""Loads and writes Hugging Face checkpoints: what all kinds have in common."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gptattn.attention import Attention, GroupedQueryAttention, HeadWeights
from gptattn.attention.base import heads_of, refuse_loss
from gptattn.errors import CheckpointError, ConfigError
from gptattn.model.gpt import GPT, GPT2_STYLE, BlockStyle
from gptattn.position import LearnedPosition, RotaryPosition
from gptattn.weights.hugging_face import (
    CONFIG,
    check_accepted,
    check_layers,
    check_weights,
    read_config,
    read_weights,
    write_folder,
)

HEAD = "lm_head"  # the same name in all families
TRIAL_TOKENS = 1024  # of the numerical comparison, whose scores are T x T


@dataclass(frozen=True)
class Sizes:
    """What config.json says about a model. Raises ValueError for an impossible size."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    d_model: int
    d_mlp: int
    context_length: int
    vocab_size: int
    style: BlockStyle = GPT2_STYLE
    tied_head: bool = True
    base: float | None = None  # of rotary positions; None: they are learned

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if type(size) is int and not 0 < size < 2**31:
                raise ValueError(f"{name} is {size}")

    def build_rope(self) -> RotaryPosition | None:
        """Return the rotary positions; None if positions are learned."""
        if self.base is None:
            return None
        return RotaryPosition(self.context_length, self.d_model // self.num_heads, self.base)


class Family(ABC):
    """One kind of model, such as GPT-2: tables of names, and methods for what no table can say.

    If several of our modules share a name in `names`, that tensor holds ours one after the other.
    """

    name: ClassVar[str]  # `model_type` in config.json, and the word after from= of convert.py
    title: ClassVar[str]  # in messages
    architecture: ClassVar[str]  # the class in transformers
    choices: ClassVar[dict[str, str]]  # the config choices that fit
    sizes: ClassVar[dict[str, str]]  # our size -> its key in config.json
    # Accepted values of other keys. We write the first, which is also what a missing key means.
    accepted: ClassVar[dict[str, tuple[Any, ...]]]
    names: ClassVar[dict[str, str]]  # our module -> theirs; N is the layer's number
    layers: ClassVar[str]  # prefix of their layers' names
    prefix: ClassVar[str]  # of all names but the head's, as we write them and in most files
    skipped: ClassVar[tuple[str, ...]]  # suffixes of names that are not read
    qkv_bias: ClassVar[bool]
    out_bias: ClassVar[bool]

    @abstractmethod
    def read_more(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return what config.json says beyond `sizes`, as arguments of `Sizes`.

        Adds a missing size to `node`. May raise ValueError, KeyError or TypeError.
        """

    @abstractmethod
    def write_more(self, sizes: Sizes) -> dict[str, Any]:
        """Return what config.json says beyond `sizes` and `accepted`."""

    @abstractmethod
    def settings(self, sizes: Sizes) -> dict[str, Any]:
        """Return the settings of such a model beyond sizes and choices."""

    @abstractmethod
    def check_model(self, model: GPT) -> None:
        """Raise ConfigError if the family has no such block, head or positions."""

    @abstractmethod
    def has_tokenizer(self, folder: Path) -> bool:
        """Whether the folder holds a tokenizer that `tokenizer=gpt2` reads correctly."""

    def transpose(self, name: str, tensor: Tensor) -> Tensor:
        """Swap the axes where the family stores a transpose, in either direction."""
        return tensor

    def read_sizes(self, folder: Path) -> Sizes:
        """Return what config.json says. Raises CheckpointError if it is missing or another's."""

        def parse(node: dict[str, Any]) -> Sizes:
            check_accepted(node, self.accepted)
            given = self.read_more(node)  # first, as it adds missing sizes
            given |= {ours: int(node[key]) for ours, key in self.sizes.items()}
            return Sizes(**given)

        return read_config(folder, parse)

    def overrides(self, folder: Path) -> list[str]:
        """Return the settings of the model in `folder`; raises as `read_sizes` does."""
        sizes = self.read_sizes(folder)
        attn: dict[str, Any] = {"attn": "mha"}
        if sizes.num_kv_heads != sizes.num_heads:
            attn = {"attn": "gqa", "attn.num_kv_heads": sizes.num_kv_heads}
        own = {name: getattr(sizes, name) for name in self.sizes if name != "num_kv_heads"}
        own = {f"model.{name}": size for name, size in own.items()}
        return as_overrides(attn | self.choices | own | self.settings(sizes))

    @torch.no_grad()
    def load(self, folder: Path) -> GPT:
        """Load the model in `folder`, in eval mode and float32, on the CPU.

        Raises CheckpointError if a file is missing or damaged, or the weights do not fit
        config.json; NumericError for a weight that is not finite.
        """
        sizes = self.read_sizes(folder)
        # The file may also contain a tied head.
        skipped = (*self.skipped, f".{HEAD}.weight") if sizes.tied_head else self.skipped
        weights = read_weights(folder, self.prefix, skipped)
        check_layers(folder, weights, self.layers, sizes.num_layers)
        try:
            with torch.device("meta"):
                outlined = self._pack(self._build(sizes).state_dict())
        except ValueError as error:
            raise CheckpointError("path", f"{folder / CONFIG}: {error}") from None
        check_weights(folder, weights, outlined)
        model = self._build(sizes)
        own = model.state_dict()
        for name, held in self._group_names(own).items():
            places = [own[ours] for ours in held]
            parts = self.transpose(name, weights[name]).split([len(place) for place in places])
            for place, part in zip(places, parts, strict=True):
                place.copy_(part)
        return model.eval()

    @torch.no_grad()
    def write(self, folder: Path, model: GPT) -> None:
        """Write a folder that transformers opens as a model of this family.

        Raises ConfigError for any other model: another block, head or positions, an attention with
        other parameters, or one that computes something else from the same heads.
        """
        self.check_model(model)
        rope = find_rope(model)
        sizes = Sizes(
            num_layers=len(model.blocks),
            num_heads=1,  # until the layers say
            num_kv_heads=1,
            d_model=model.token_embedding.embedding_dim,
            d_mlp=model.layers()[0].d_mlp,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            style=model.style,
            tied_head=model.lm_head is None,
            base=None if rope is None else rope.base,
        )
        ours = {name: w for name, w in model.state_dict().items() if ".attention." not in name}
        of_layers: list[Sizes] = []
        for layer, block in enumerate(model.layers()):
            try:
                weights, of_layer = self._export_heads(block.attention, sizes)
            except ValueError as error:
                raise ConfigError("to", f"layer {layer}: {error}") from None
            of_layers.append(of_layer)
            ours |= {f"blocks.{layer}.attention.{name}": w for name, w in weights.items()}
        if len(set(of_layers)) > 1:
            raise ConfigError(
                "to", f"{self.title} has as many heads in every layer; convert to one count first"
            )
        config = {
            "architectures": [self.architecture],
            **{key: values[0] for key, values in self.accepted.items()},
            **{key: getattr(of_layers[0], size) for size, key in self.sizes.items()},
            **self.write_more(of_layers[0]),
        }
        packed = self._pack(ours).items()
        prefixed = {n if n.startswith(HEAD) else self.prefix + n: tensor for n, tensor in packed}
        write_folder(folder, config, prefixed)

    def _build(self, sizes: Sizes) -> GPT:
        rope = sizes.build_rope()
        learned = LearnedPosition(sizes.context_length, sizes.d_model) if rope is None else None
        return GPT(
            vocab_size=sizes.vocab_size,
            context_length=sizes.context_length,
            d_model=sizes.d_model,
            num_layers=sizes.num_layers,
            attention=lambda layer: self._build_attention(sizes, rope),
            input_position=learned,
            d_mlp=sizes.d_mlp,
            dropout=0.0,
            style=sizes.style,
            tied_head=sizes.tied_head,
        )

    def _build_attention(self, sizes: Sizes, rope: RotaryPosition | None) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            sizes.d_model,
            sizes.d_model,
            sizes.context_length,
            sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            position=rope,
        )

    def _group_names(self, ours: Iterable[str]) -> dict[str, list[str]]:
        """Return our names for the tensors that each of theirs holds."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in ours:
            *module, kind = name.split(".")
            number = ""
            if module[0] == "blocks":
                number, module[1] = module[1], "N"
            groups[f"{self.names['.'.join(module)]}.{kind}".replace("N", number)].append(name)
        return groups

    def _pack(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors, made from ours."""
        groups = self._group_names(ours).items()
        joined = {name: torch.cat([ours[one] for one in held]) for name, held in groups}
        return {name: self.transpose(name, tensor) for name, tensor in joined.items()}

    def _export_heads(self, attention: Attention, sizes: Sizes) -> tuple[dict[str, Tensor], Sizes]:
        """Return the weights of the family's attention with these heads, and the sizes with theirs.

        Raises ValueError if the family has no attention with such heads and the same outputs.
        """
        weights = heads_of(attention).export_heads()
        refuse_loss(attention, set())
        self.check_heads(weights)
        sizes = replace(sizes, num_heads=len(weights.q_HDE), num_kv_heads=len(weights.k_GDE))
        like = self._build_attention(sizes, sizes.build_rope()).to(weights.q_HDE)
        like.load_heads(weights)
        if not attend_alike(attention, like):
            raise ValueError(
                f"the same heads give other outputs in {self.title}, whose scores have no scale "
                "but head_dim ** -0.5, no window and no soft cap"
            )
        return like.state_dict(), sizes

    def check_heads(self, weights: HeadWeights) -> None:
        """Raise ValueError if the family's attention lacks such weights."""
        if weights.out_EHD is None:
            raise ValueError(f"{self.title} has an output projection, but this model has none")
        for what, bias, wanted in (
            ("qkv biases", weights.q_bias_HD, self.qkv_bias),
            ("biases in the output projection", weights.out_bias_E, self.out_bias),
        ):
            if wanted and bias is None:
                raise ValueError(f"{self.title} has {what}, but this model has none")
            if bias is not None and not wanted:
                raise ValueError(f"{self.title} has no {what}, but this model has")


def find_rope(model: GPT) -> RotaryPosition | None:
    """Return the model's rotary positions; None if it has others."""
    return next((m for m in model.modules() if isinstance(m, RotaryPosition)), None)


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as written on the command line."""
    return [f"{name}={str(value).lower()}" for name, value in settings.items()]


def attend_alike(attention: Attention, plain: Attention) -> bool:
    """Whether both give the same outputs.

    It compares numbers, as a variant may change scores in any way. The inputs are ten times what a
    norm gives, so that a soft cap shows.
    """
    longest = attention.context_length
    T, w = min(longest, TRIAL_TOKENS), next(plain.parameters())
    x_BTE = torch.randn(1, T, attention.d_in, generator=torch.Generator().manual_seed(0))
    x_BTE = 10 * x_BTE.to(w)
    own, expected = attention.eval()(x_BTE), plain.eval()(x_BTE)
    alike = bool((own - expected).abs().max() <= 1e-3 * expected.std())
    # All pairs, also those beyond the trial.
    return alike and attention.flops(longest, longest) == plain.flops(longest, longest)
