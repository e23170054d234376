"""Checks each kind of layer before a run: causal, the same through its cache, and trainable.

A *changed token*, not a gradient, shows what an output depends on: the gradient is exactly zero for
leaks through detached statistics, expert choice, top-k before the mask, or means over the batch.
Gradients are compared with finite differences, and the run's device with the CPU.
"""

import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gptattn.attention.base import Attention, Shared
from gptattn.attention.cache import Cache
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.build.model import build_model, resolve_backends
from gptattn.errors import ConfigError, ForeignError
from gptattn.machine.device import DTYPES, resolve_device
from gptattn.machine.ending import find_own_code
from gptattn.position.base import Documents
from gptattn.settings.config import TrainConfig
from gptattn.settings.construct import arguments_of, find_target

WIDTH = 64  # roughly, of the copies to check
TOKENS = 70  # beyond a chunk of 64
SOME_CUTS = (1, 2, 3, 16, 31, 32, 33, 63, 64, 65)  # enough where a layer is too wide for all
# Share of the largest output, or of a norm, by the least exact type: above rounding, below leaks.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
SCALES = (1.0, 30.0, 1 / 30)  # of changed tokens: those of the usual size rarely move a maximum
FLIPS = 0.4  # share of the norm, where rounding flips a few tokens' choices, such as dsa's top-k
OUTPUT = "the output"
CONSTANT_STD = 0.1  # of values in place of constants: an output that starts at 0 hides faults


# Layers' settings and classes (which a notebook may reload) -> the notes on the layers.
_notes: dict[tuple[str, tuple[Any, ...]], list[str]] = {}


class BrokenLayer(ConfigError):
    """A layer that cannot be compared with others: it leaks, or its cache changes its outputs."""


@dataclass(frozen=True)
class Stack:
    """A layer, after the earlier ones whose state it shares."""

    layers: list[Attention]
    field: str  # the setting that chose it
    drops: bool  # whether its constructor takes dropout and gets more than 0

    @property
    def title(self) -> str:
        """The last layer's name in messages: its class, with its parts."""
        last = self.layers[-1]
        parts = getattr(last, "parts", None)
        return "+".join([last.title, *(parts if isinstance(parts, nn.ModuleDict) else ())])

    @property
    def stops_gradient(self) -> bool:
        """Whether a module of these layers declares that its gradients are not its outputs'."""
        modules = nn.ModuleList(self.layers).modules()
        return any(getattr(module, "stops_gradient", False) for module in modules)

    def error(self, what: str) -> BrokenLayer:
        """Return the error about the last layer."""
        without = "checks=false trains it anyway, but do not compare it"
        return BrokenLayer(self.field, f"{self.title} {what}; {without}")

    def draw_x(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw x [2, T, d_in], with no more tokens than the last layer takes."""
        last = self.layers[-1]
        return torch.randn(2, min(TOKENS, last.context_length), last.d_in, dtype=dtype)


class LowestPrecision(TorchDispatchMode):
    """Finds the tolerance for code that runs in this context: some modules insist on float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tolerance = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.ndim > 1:  # no constants
                self.tolerance = max(self.tolerance, TOLERANCE.get(one.dtype, 0.0))
        return result


def check_layers(cfg: TrainConfig) -> list[str]:
    """Check each kind of layer of these settings on the CPU; return notes on what is unusual.

    Checks small float64 copies where the constructor and the module allow it: with random values in
    constant parameters, in training (with dropout, at the same random state) and in evaluation
    mode. A process checks a layer once, although a sweep asks for each text, budget and optimizer.
    Raises ConfigError, which names the setting, for a layer that breaks the contract (a
    BrokenLayer), ForeignError for an error in the user's own file, and errors of `build_model`.
    """
    kinds = cfg.kinds()
    targets = tuple(find_target(kind.field, kind.attn, cfg.allow_targets) for kind in kinds)
    key = repr((kinds, cfg.pattern, cfg.model, cfg.block)), targets
    if key in _notes:
        return _notes[key]
    heads = cfg.model.num_heads
    width = min(cfg.model.d_model, 8 * heads * max(1, WIDTH // (8 * heads)))
    small = replace(cfg, model=replace(cfg.model, d_model=width, context_length=TOKENS))
    attempts = [*product((small, cfg), (torch.float64, torch.float32))]
    notes: dict[str, None] = {}
    for sizes, dtype in attempts:
        try:
            with torch.random.fork_rng(devices=[]):
                for stack in list_stacks(draw_layers(sizes), sizes):
                    notes |= dict.fromkeys(check_stack(stack, dtype))
            break
        except Exception as error:  # another size or type may work
            if isinstance(error, BrokenLayer) or (sizes, dtype) == attempts[-1]:
                raise
    _notes[key] = list(notes)
    return _notes[key]


@torch.no_grad()
def draw_layers(cfg: TrainConfig, seed: int = 0) -> list[Attention]:
    """Build the attention of each layer, with random values in what would be constant."""
    torch.manual_seed(seed)
    bare = replace(cfg, model=replace(cfg.model, mlp="none", vocab_size=None))
    layers = [block.attention for block in build_model(bare, vocab_size=1).layers()]
    for layer in layers:
        layer.initialise(layer.d_in**-0.5)
        for parameter in layer.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.normal_(0.0, CONSTANT_STD)
    return layers


def list_stacks(layers: Sequence[Attention], cfg: TrainConfig) -> Iterator[Stack]:
    """Yield one stack for each kind of layer."""
    seen = set()
    for i, layer in enumerate(layers):
        chosen = cfg.layer(i)
        state = sorted(layer.provides()), sorted(layer.needs())
        sizes = [(name, tuple(weight.shape)) for name, weight in layer.state_dict().items()]
        kind = repr((chosen, state, sizes))
        if kind in seen:
            continue
        seen.add(kind)
        needed, members = {*layer.needs()}, [layer]
        for earlier in reversed(layers[:i]):
            if provided := needed & earlier.provides().keys():
                members.insert(0, earlier)
                needed = needed - provided | earlier.needs().keys()
        takes = arguments_of(find_target(chosen.field, chosen.attn, cfg.allow_targets)).types
        drops = "dropout" in takes and chosen.attn.get("dropout", cfg.model.dropout) > 0
        yield Stack(members, chosen.field.partition(".")[0], drops)


def check_stack(stack: Stack, dtype: torch.dtype) -> list[str]:
    """Check a stack on the CPU in this dtype; return notes. Raises ConfigError, or as `run`."""
    last = stack.layers[-1]
    dtypes = {p.dtype for p in last.parameters() if p.is_floating_point() or p.is_complex()}
    dtypes -= {torch.get_default_dtype()}
    if dtypes:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise stack.error(f"has weights of {listed}; give it real ones of torch's default dtype")
    modules = nn.ModuleList(stack.layers).to(dtype)
    pair = stack.draw_x(dtype)
    T = pair.shape[1]
    cuts = [*range(1, T)] if last.d_in <= 2 * WIDTH else [cut for cut in SOME_CUTS if cut < T]
    x = pair[:1].repeat(len(cuts) + 1, 1, 1)
    changed = x.clone()  # row 0 stays; each other row changes from its own cut on
    for row, cut in enumerate(cuts, 1):
        changed[row, cut:] = SCALES[row % 3] * torch.randn(T - cut, last.d_in, dtype=dtype)

    notes = []
    for training in (True, False):
        modules.train(training)
        with torch.set_grad_enabled(training), LowestPrecision() as seen:
            y = run(stack, pair).detach()
        near = seen.tolerance * float(y.abs().max())

        mode = "in training" if training else "in evaluation"
        if not y.isfinite().all():
            raise stack.error(f"returns NaN or infinity {mode}; look for a query without keys")
        with torch.no_grad():
            among = run(stack, changed)
            drew = not torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())
            drops = drew and training
            again = run(stack, pair), run(stack, pair, seed=0 if drops else 1)
            # The masks of dropout depend on the number of rows.
            alone = y if drops else torch.cat([run(stack, row) for row in pair.split(1)])
            moved = differ(among, run(stack, x) if drops else y[:1], near)
        if any(differ(one, y, near).any() for one in again):
            raise stack.error(
                f"gives different outputs for the same x {mode}: it keeps state between batches, "
                "or its randomness ignores self.training or torch's seed; keep state only in the "
                "cache"
            )
        if moved[0].any() or differ(alone, y, near).any():
            raise stack.error(
                "mixes the rows of a batch: a row's outputs change with the other rows; let each "
                "output depend only on its own row"
            )
        leaks = moved & (torch.arange(T) < torch.tensor([0, *cuts])[:, None])
        leaks &= among.isfinite().all(2).all(1, keepdim=True)  # large tokens may overflow
        if leaks.any():
            output = int(leaks.any(0).nonzero()[0])
            token = cuts[int(leaks[1:, output].nonzero()[-1])]
            which = f"token {token}" if len(cuts) == T - 1 else f"tokens from {token} on"
            raise stack.error(
                f"is not causal: output {output} changes with {which}; mask the scores, or shift "
                "what it reads, so that an output depends on no later token"
            )
        if training:
            notes += check_gradients(stack, pair, seen.tolerance)
            if stack.drops and not drops:
                notes.append(f"{stack.field}: {stack.title} takes dropout but ignores it")
        else:
            check_prefixes(stack, pair, y, near)
    return notes


def differ(a: Tensor, b: Tensor, near: float) -> Tensor:
    """Return whether each output differs, or is NaN: [B, T]."""
    return ~((a - b).abs().amax(-1) <= near)


def check_gradients(stack: Stack, x: Tensor, tolerance: float) -> list[str]:
    """Check that all gradients are finite and correct; return a note on parameters without one.

    They are compared with finite differences along a random direction, if this `tolerance` is small
    enough for that and no module declares `stops_gradient`.
    """
    leaves = list_leaves(stack, x)
    grads = differentiate(stack, leaves)
    for name, gradient in grads.items():
        if not gradient.isfinite().all():
            raise stack.error(f"has a gradient of {name} that is not finite")
    near = tolerance**0.5 * float(nn.utils.get_total_norm(grads.values()))
    along = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}

    @torch.no_grad()
    def is_wrong(names: Collection[str], step: float) -> bool:
        slope = sum(float((grads[name] * along[name]).sum()) for name in names)
        values = []
        for distance in (step, -2 * step, step):  # the last one leads back
            for name in names:
                leaves[name].add_(along[name], alpha=distance)
            values.append(float(measure(stack, leaves)))
        return abs((values[0] - values[1]) / (2 * step) - slope) > near

    exact = tolerance <= TOLERANCE[torch.float32] and not stack.stops_gradient
    # A kink may lie between the points of one step.
    if exact and all(is_wrong(leaves, step) for step in (tolerance, tolerance / 10)):
        wrong = ", ".join(name for name in leaves if is_wrong([name], tolerance)) or "all together"
        raise stack.error(
            f"has a gradient of {wrong} that differs from finite differences; correct its backward "
            "or detach(), or declare stops_gradient = True if this is intended"
        )
    idle = [name for name in leaves if name not in ("x", OUTPUT) and not grads[name].any()]
    return [f"{stack.field}: {stack.title} does not train its {', '.join(idle)}"] if idle else []


def list_leaves(stack: Stack, x: Tensor) -> dict[str, Tensor]:
    """Return what `measure` depends on, by name: the weights, x, and random weights of outputs."""
    named = stack.layers[-1].named_parameters()  # earlier layers have stacks of their own
    leaves: dict[str, Tensor] = {
        name.removeprefix("module."): weight for name, weight in named if weight.requires_grad
    }
    pull = torch.randn(*x.shape[:2], stack.layers[-1].d_out, dtype=x.dtype)
    return {**leaves, "x": x.clone().requires_grad_(), OUTPUT: pull.requires_grad_()}


def measure(stack: Stack, leaves: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of all outputs, weighted, and of the layers' own losses."""
    own: dict[str, list[Tensor]] = {}
    y = run(stack, leaves["x"], losses=own)
    return (y * leaves[OUTPUT]).sum() + sum(one for losses in own.values() for one in losses)


def differentiate(stack: Stack, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of `measure`, by name; that of the outputs' weights is the output."""
    for leaf in leaves.values():
        leaf.grad = None
    loss = measure(stack, leaves)
    try:
        loss.backward()
    except RuntimeError as error:
        message = f"cannot be trained: backward raises {type(error).__name__}: {error}"
        raise stack.error(message) from error
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    return {k: torch.zeros_like(leaves[k]) if g is None else g for k, g in grads.items()}


def check_device(cfg: TrainConfig) -> None:
    """Check that each kind of layer computes on the run's device what it does on a CPU in float32.

    It compares outputs and gradients of the same weights in the run's precision and backend: at the
    model's width, because kernels depend on the head size, and in evaluation mode, because devices
    draw different masks. Raises a BrokenLayer, or ForeignError for an error in the user's file.
    """
    device, precision = resolve_device(cfg.trainer.accelerator), cfg.trainer.precision
    dtype, mixed = DTYPES[precision], precision.endswith("-mixed")
    stored = torch.float32 if mixed else dtype
    if (device.type, dtype) == ("cpu", torch.float32):
        return
    if cfg.trainer.deterministic:  # cuBLAS reads this once, and Lightning sets it later
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    cfg, _ = resolve_backends(cfg, device)
    with torch.random.fork_rng(devices=[]):
        for stack in list_stacks(draw_layers(cfg), cfg):
            modules, results = nn.ModuleList(stack.layers).eval(), []
            leaves = list_leaves(stack, stack.draw_x())
            # The device first, so that both compute with weights and x of its precision.
            for place, kind in ((device, stored), (torch.device("cpu"), torch.float32)):
                modules.to(place, kind)
                for leaf in (leaves["x"], leaves[OUTPUT]):
                    leaf.data = leaf.data.to(place, kind)
                with torch.autocast(place.type, dtype, enabled=mixed and not results):
                    results.append(differentiate(stack, leaves))
            actual, expected = results
            # Where terms cancel, as in the gradient of a key's bias, rounding is all that is left.
            least = 0.1 * max(map(rms, expected.values()))
            errors = {
                name: rms(actual[name].to(one) - one) / max(rms(one), least)
                for name, one in expected.items()
            }
            name = max(errors, key=errors.__getitem__)
            limit = max(TOLERANCE[dtype], 1e-3)  # as the CPU is in float32
            if errors[name] > (FLIPS if stack.stops_gradient else limit):
                what = name if name == OUTPUT else f"the gradient of {name}"
                raise stack.error(
                    f"gives different results on {device.type} in {precision} than on a CPU in "
                    f"float32: {what} differs by {errors[name]:.2g} of its norm, beyond rounding; "
                    "choose another backend or trainer.precision"
                )


def rms(x: Tensor) -> float:
    """Return the root of the mean square, or infinity for NaN."""
    return float(x.square().mean().sqrt().nan_to_num(torch.inf))


@torch.no_grad()
def check_prefixes(stack: Stack, x: Tensor, y: Tensor, near: float) -> None:
    """Check in evaluation mode that prefixes, and chunks through the cache, give this y."""
    T = x.shape[1]
    for tokens in (1, (T + 1) // 2):
        if differ(run(stack, x[:, :tokens]), y[:, :tokens], near).any():
            raise stack.error(
                f"is not causal: the output changes with the text's length (alone, the first "
                f"{tokens} of {T} tokens give different outputs, or NaN); don't use T in a scale"
            )
    singly = [1] * min(5, T)  # then all but two at once, if there are enough
    middle = [T - 7, 1, 1] if T > 7 else [1] * (T - len(singly))
    for chunks in ([*singly, *middle], [(T + 1) // 2, T // 2]):
        wrong = differ(run(stack, x, chunks), y, near).any(0)
        if wrong.any():
            raise stack.error(
                f"decodes wrongly: through the cache, output {int(wrong.nonzero()[0])} differs "
                f"from one full pass (chunks of {','.join(map(str, chunks))} tokens); write every "
                "token's entries, and read those of all earlier tokens"
            )


def run(
    stack: Stack,
    x: Tensor,
    chunks: Sequence[int] | None = None,
    *,
    seed: int = 0,
    documents: Documents | None = None,
    losses: dict[str, list[Tensor]] | None = None,
) -> Tensor:
    """Return the last layer's y [B, T, d_out], from the random state of this seed.

    Each layer reads the residual stream, to which the layers before it have added. `chunks`: run
    through caches, this many tokens at a time. `documents`: of rows that hold several. `losses`
    collects the layers' own losses. Raises ConfigError for a wrong y, ForeignError for an error in
    a layer that is not ours, and other errors as they are.
    """
    torch.manual_seed(seed)
    caches = [layer.new_cache(len(x), x.shape[1]) if chunks else None for layer in stack.layers]
    start, ys = 0, []
    for part in x.split([tokens for tokens in chunks or [x.shape[1]] if tokens], dim=1):
        at, stream, y = documents or range(start, start + part.shape[1]), part, part
        shared = Shared(at, losses=losses)
        for layer, cache in zip(stack.layers, caches, strict=True):
            y = _call(stack, layer, stream, cache, shared)
            stream = stream + y
            if cache is not None:
                cache.advance(part.shape[1])
        start += part.shape[1]
        ys.append(y)
    return torch.cat(ys, dim=1)


def _call(stack: Stack, layer: Attention, x: Tensor, cache: Cache | None, shared: Shared) -> Tensor:
    try:
        y = layer(x, cache, shared)
    except Exception as error:
        raise_foreign(error, layer, x)
        raise
    shape = [*x.shape[:2], layer.d_out]
    same_type = torch.is_autocast_enabled(x.device.type) or getattr(y, "dtype", None) == x.dtype
    if not isinstance(y, Tensor) or list(y.shape) != shape or not same_type:
        what = f"{list(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        result = f"{layer.title} returns {what} for x {list(x.shape)} of {x.dtype}"
        raise ConfigError(stack.field, f"{result}; return a tensor {shape} of x's dtype")
    return y


def raise_foreign(error: Exception, layer: Attention, x: Tensor) -> None:
    """Raise the one-line error for a layer that failed on x, unless the layer is ours."""
    given = f"x {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    kind = getattr(layer, "module", layer)
    what = f"{type(error).__name__}: {error}"
    if (place := find_own_code(error)) is not None:
        raise ForeignError(place, f"{what}; {layer.title} was given {given}") from error
    if type(kind).__module__.startswith("gptattn."):
        return
    if isinstance(layer, SoftmaxAttention):
        shapes = [list(one.shape) for one in layer.project(x)]
        what += f"; its project() returns {', '.join(map(str, shapes))}; return queries "
        what += "[B, H, T, D], keys [B, G, T, D] and values [B, G, T, D]"
    file = inspect.getsourcefile(type(kind)) or type(kind).__module__
    raise ForeignError(os.path.relpath(file), f"{layer.title} fails on {given}: {what}") from error
