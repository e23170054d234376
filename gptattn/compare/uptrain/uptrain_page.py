"""The report as Markdown: what was done, the table, the plot, the words, and how to read them."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

from gptattn.compare.comparison import compare_all
from gptattn.compare.finished_runs import Run
from gptattn.compare.plot_style import Plot
from gptattn.compare.results import Difference
from gptattn.compare.statistics import t_interval
from gptattn.compare.table import MISSING, half_interval, markdown_table
from gptattn.compare.uptrain.experiment import Experiment
from gptattn.compare.uptrain.findings import Findings
from gptattn.compare.uptrain.uptrain_words import sentences, verdict
from gptattn.compare.verdicts import p_value, signed

HEADING = ["attention", "from", "α", "steps", "total steps", "total tokens", "n", "val loss"]


def table_rows(experiment: Experiment) -> list[list[str]]:
    """The cells of the table, a heading row first."""
    source, original_steps = experiment.source, experiment.original_steps
    heading = [*HEADING, f"vs {source}"]
    rows = [[source, "scratch", *_row(experiment, experiment.originals, original_steps, None)]]
    for target in experiment.targets:
        if experiment.scratch[target]:
            row = _row(experiment, experiment.scratch[target], original_steps, None)
            rows.append([target, "scratch", *row])
        for steps in experiment.steps:
            for method in experiment.methods:
                members = experiment.cells.get((target, method, steps))
                if members:
                    row = _row(experiment, members, original_steps + steps, steps)
                    rows.append([target, f"{source}, {method}", *row])
    return [heading, *rows]


def order_rows(experiment: Experiment, findings: Findings) -> list[list[str]]:
    """The cells of the table on the order, a heading row first."""
    steps = [f"{b} - {a}" for a, b in pairwise(experiment.methods)]
    rows = [["attention", "α", *steps, "in order", "p (Page, Holm)", "the paper's order"]]
    for order in findings.orders:
        found = {f"{d.variant} - {d.baseline}": d for d in order.neighbours}
        pairs = [_with_interval(found[name]) if name in found else MISSING for name in steps]
        p = MISSING if order.p_holm is None else p_value(order.p_holm).removeprefix("p ")
        share = f"{experiment.share(order.steps):g}"
        seeds = f"{order.holds} of {order.n} seeds"
        rows.append([order.target, share, *pairs, seeds, p, verdict(order)])
    return rows


def _with_interval(d: Difference) -> str:
    if d.interval is None:
        return signed(d.mean)
    return f"{signed(d.mean)} ({signed(d.interval[0])} to {signed(d.interval[1])})"


def _row(
    experiment: Experiment, members: Sequence[Run], total: int, uptrained: int | None
) -> list[str]:
    losses = [run.metrics["val/loss"] for run in members]
    loss = f"{mean(losses):.4f}{half_interval(t_interval(losses), '.4f')}"
    share = MISSING if uptrained is None else f"{experiment.share(uptrained):g}"
    cells = [share, f"{total if uptrained is None else uptrained:,}", f"{total:,}"]
    cells += [f"{total * experiment.tokens_per_step:,}", f"{len(members)}", loss]
    return [*cells, _difference(experiment, members)]


def _difference(experiment: Experiment, members: Sequence[Run]) -> str:
    """The mean difference to the originals, and no interval: no claim is made of so many pairs."""
    if members is experiment.originals:
        return MISSING
    found = compare_all({"a": list(members), "b": experiment.originals}, ["a"], "b")
    return signed(found[0].mean) if found else MISSING


def page_text(
    experiment: Experiment, findings: Findings, plot: Plot, commands: Sequence[str]
) -> str:
    """The whole report; the plot lies beside it as `<name>.png`."""
    first = experiment.originals[0]
    targets = " and ".join(experiment.targets)
    parts = [
        f"# Uptraining {experiment.source} to {targets}",
        "Ainslie et al. 2023 ([arXiv:2305.13245](https://arxiv.org/abs/2305.13245), sec. 2.1): "
        f"train {experiment.source}, merge its key/value heads, and train on for a share α of the "
        "original steps.",
        *(["```bash\n" + "\n".join(commands) + "\n```"] if commands else []),
        _setting(experiment, first),
        markdown_table(table_rows(experiment)),
        f"![{plot.caption}]({plot.name}.png)",
        plot.caption,
        "## The order of the methods",
        markdown_table(order_rows(experiment, findings)),
        "## What it shows",
        "\n".join(f"- {line}" for line in sentences(experiment, findings)),
        "## How to read it",
        "\n".join(f"- {line}" for line in _reading()),
    ]
    return "\n\n".join(parts) + "\n"


def _setting(experiment: Experiment, first: Run) -> str:
    (child, *_) = next(iter(experiment.cells.values()))
    s, peak = first.settings, child.settings.get("optim.lr", "?")
    seeds = ", ".join(str(run.seed) for run in experiment.originals)
    return (
        f"Model {first.choices.get('model', '?')} ({s.get('model.num_layers')} layers, "
        f"{s.get('model.num_heads')} heads, width {s.get('model.d_model')}, context "
        f"{s.get('model.context_length')}), data {first.choices.get('data', '?')}, seeds {seeds}. "
        f"The originals: {experiment.original_steps:,} steps of {experiment.tokens_per_step:,} "
        f"tokens, peak learning rate {s.get('optim.lr')}. Uptraining: peak {peak}, warm-up and "
        f"cosine as in the original but over its own steps, down to "
        f"{s.get('optim.final_lr_fraction')} of the peak, a new optimizer state; the same for all "
        "methods."
    )


def _reading() -> list[str]:
    return [
        "The paper compares the methods after uptraining, by task scores of far larger models. "
        "Here it is the loss, at every share, α = 0 among them.",
        "val loss: nats per token, mean over seeds ± half of the mean's 95% interval.",
        "Differences are paired by seed. Their intervals and p are Student's, corrected for all "
        "comparisons of one kind: neighbours in the order; a target right after conversion with "
        "its original, or with another one; an uptrained target with the same from scratch. A "
        "difference is shown where its interval leaves 0 out.",
        "Uptrained models have seen more tokens than those from scratch, by the share α; the "
        "original's tokens count for them, since they were spent. Their batches are the first "
        "ones of their seed's order again.",
        "`mean`: a new head is the mean of those it stands for; `first`: the first of them; "
        "`random`: keys and values drawn anew as before training. Queries, output projection and "
        "all else are the original's.",
        "An order is called shown where the means are in it and Page's test of ordered "
        "alternatives, exact, paired by seed, is below 0.05 after Holm's correction over all "
        "targets and shares. Page's test tells an order from no difference at all. Neighbours in "
        "the order have tests of their own.",
    ]
