"""What papers say of mechanisms of the menu against others, as the sign of a difference."""

from collections.abc import Mapping
from dataclasses import dataclass, field

BETTER, EQUAL, WORSE = -1, 0, 1  # the sign of the difference in loss


@dataclass(frozen=True)
class Model:
    """One side of a published comparison."""

    variant: str  # as in the runs' settings: attention and parts
    position: str | None = None  # None: that of the block
    settings: Mapping[str, str] = field(default_factory=dict)  # those that the paper's model has


@dataclass(frozen=True)
class Claim:
    """A published result: the loss of one model against that of another."""

    model: Model
    against: Model
    sign: int
    words: str  # what was measured
    source: str


MHA, GQA, MQA = Model("mha"), Model("gqa"), Model("mqa")

# Only what a paper says that it measured, against what that paper compared with. Where one
# trades quality for cost, the sign is that of its figures.
CLAIMS = (
    Claim(
        GQA,
        MHA,
        WORSE,
        "task scores 47.1 against 47.2 at 11B, uptrained from mha",
        "2305.13245, table 1",
    ),
    Claim(GQA, MHA, WORSE, "zero-shot 45.04 against 46.19 at 124M", "2501.06425, table 11"),
    Claim(
        MQA,
        MHA,
        WORSE,
        "task scores 46.6 against 47.2 at 11B, uptrained from mha",
        "2305.13245, table 1",
    ),
    Claim(MQA, MHA, WORSE, "zero-shot 45.14 against 46.19 at 124M", "2501.06425, table 11"),
    Claim(
        Model("single_head"),
        MHA,
        WORSE,
        "0.9 BLEU below the best number of heads",
        "1706.03762, table 3 (A)",
    ),
    Claim(
        Model("mla"),
        MHA,
        BETTER,
        "BBH 39.0 against 37.9, and 50.7 against 46.6",
        "2405.04434, app. D.2, table 9",
    ),
    Claim(
        Model("mla"), MHA, EQUAL, "zero-shot 46.20 against 46.19 at 124M", "2501.06425, table 11"
    ),
    Claim(
        Model("tpa"), MHA, EQUAL, "zero-shot 46.21 against 46.19 at 124M", "2501.06425, table 11"
    ),
    Claim(
        Model("differential"),
        MHA,
        BETTER,
        "equal loss at about 65% of the size or of the tokens",
        "2410.05258, abstract",
    ),
    Claim(Model("mha+gate"), MHA, BETTER, "perplexity 7.404 against 7.499", "2505.06708, table 2"),
    Claim(
        Model("mha+value_residual"),
        MHA,
        BETTER,
        "equal validation loss with 16.1% fewer parameters",
        "2410.17897, abstract",
    ),
    Claim(
        Model("cross_layer"),
        MQA,
        WORSE,
        "perplexity 13.60 against 13.54; better in the table for 3B",
        "2405.12981, table 1",
    ),
    Claim(
        Model("gated_deltanet", "none", {"attn.conv_size": "4"}),
        Model("mha", "rope"),
        BETTER,
        "Wiki perplexity 16.42 against 18.53 at 1.3B",
        "2412.06464, table 3",
    ),
    Claim(
        Model("mha", "alibi"),
        Model("mha", "sinusoidal"),
        BETTER,
        "perplexity on WikiText-103",
        "2108.12409, tables 2 and 3",
    ),
)
