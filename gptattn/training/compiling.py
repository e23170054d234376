"""torch.compile of a model's blocks: when it pays, and how many graphs it takes."""

from gptattn.model.gpt import GPT
from gptattn.settings.budget import Budget
from gptattn.settings.config import TrainConfig

# Estimates for a GPU; only the rate was measured, with GPT-2 small in bf16-mixed on an H200.
FLOPS_PER_SECOND = 2e14
LAUNCH_SECONDS = 2e-3  # the host's least time for a layer, forward and backward
COMPILE_SECONDS = 15.0  # for a kind of layer, in both modes


def count_kinds(cfg: TrainConfig, model: GPT) -> int:
    """Return how many kinds of layers there are; those of a kind share their compiled code.

    What a layer reads from earlier layers counts too. A user's own layer is always its own kind.
    """
    kinds, providers = set(), {}
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        packages = {type(one).__module__.partition(".")[0] for one in attention.modules()}
        name = cfg.layer(layer).field if packages <= {"gptattn", "torch"} else layer
        kind = name, *attention.provides(), *(providers[need] for need in attention.needs())
        providers |= dict.fromkeys(attention.provides(), kind)
        kinds.add(kind)
    return len(kinds)


def compiling_pays_off(
    cfg: TrainConfig, model: GPT, budget: Budget, flops_per_token: float
) -> bool:
    """Return whether a run on a GPU is so long that saving a quarter of each step pays off."""
    flops = flops_per_token * cfg.batch_size * cfg.model.context_length / cfg.trainer.processes
    launch = LAUNCH_SECONDS * cfg.model.num_layers * cfg.accumulate
    seconds = budget.seconds or (budget.steps or 0) * max(flops / FLOPS_PER_SECOND, launch)
    return seconds >= 4 * COMPILE_SECONDS * count_kinds(cfg, model)


def uses_backend(cfg: TrainConfig, backend: str) -> bool:
    """Return whether layers have this backend: flex is compiled even if blocks are not."""
    return any(kind.attn.get("backend") == backend for kind in cfg.kinds())


def compile_blocks(cfg: TrainConfig, model: GPT) -> None:
    """Compile the blocks in place, if the settings say so; names in checkpoints stay the same."""
    if not (cfg.compile or uses_backend(cfg, "flex")):
        return
    from torch import _dynamo  # slow to import

    # In training and in validation; flex alone also in the layer check and for a smaller batch.
    _dynamo.config.recompile_limit += 4 * count_kinds(cfg, model)
    if cfg.compile:
        _dynamo.config.fail_on_recompile_limit_hit = True  # else it goes on without compiling
        _dynamo.config.optimize_ddp = False  # it would cut a block's graph at DDP's buckets
        # fla's kernels break a block's graph: once, not in every function on the way to them.
        _dynamo.config.nested_graph_breaks = uses_backend(cfg, "fla")
        for block in model.layers():
            block.compile(dynamic=False)
