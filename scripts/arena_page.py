"""Writes the figures of docs/arena.md from the runs of `experiment=arena`.

`python scripts/arena_page.py [outputs/arena]`, after `python train.py -m experiment=arena`.
What stands between two marks of the page, `<!-- arena: NAME -->` and `<!-- arena: end -->`, is
replaced; the rest is written by hand. Beside the page it writes arena/differences.png, and
arena/settings.yaml, which has the settings of every row.
"""

import argparse
import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from arena_published import published
from arena_rates import rates
from matplotlib import rc_context

from gptattn.compare.comparison import Comparison, Section, compare
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.plots import COLOURS, INK, STYLE, draw, new_figure
from gptattn.compare.table import markdown_table, report_rows
from gptattn.compare.verdicts import cost_words, first_words, headline, shown_words
from gptattn.errors import ConfigError
from gptattn.machine.disk import write_atomically
from gptattn.machine.ending import ended
from gptattn.runs.folder import TUNING
from gptattn.settings.compose import CONF

PAGE = CONF.parent / "docs" / "arena.md"
PLACE = "arena"  # the folder beside the page
# Speed and memory of runs that shared the machine say little.
LEFT_OUT = ("tokens/s", "step ms", "peak MB", "bits/byte")
NAMES = ("results", "rates", "published")  # of the marks
ROW_INCHES = 0.24  # of the picture, for each row
WIDER = 0.4  # of the differences' range, on both sides; longer intervals end at the edge


def main() -> None:
    """Read the runs, and write the page, its picture and the settings.

    Raises a UserError if the page lacks a mark or the folder holds no finished run.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/arena"))
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    text = marked_text(args.page)
    comparison = compare(read_runs([args.folder])[0])
    parts = {
        "results": results(comparison),
        "rates": rates(comparison, args.folder / TUNING),
        "published": published(comparison),
    }
    for name, lines in parts.items():
        body = "\n" + "\n\n".join(lines) + "\n\n"
        text = re.sub(_marks(name), lambda m, body=body: m[1] + body + m[2], text, flags=re.DOTALL)
    beside = args.page.parent / PLACE
    beside.mkdir(exist_ok=True)
    save(beside / "differences.png", picture(comparison))
    save(beside / "settings.yaml", settings_text(comparison).encode())
    save(args.page, text.encode())
    print(f"wrote {args.page}")


def marked_text(page: Path) -> str:
    """Return the page's text. Raises ConfigError if it cannot be read or a mark is missing."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--page", f"{page} cannot be read ({error}); give docs/arena.md"
        ) from None
    for name in NAMES:
        if not re.search(_marks(name), text, re.DOTALL):
            raise ConfigError(
                "--page",
                f"{page} has no mark <!-- arena: {name} --> with an <!-- arena: end -->; "
                "restore both",
            )
    return text


def _marks(name: str) -> str:
    """Return the pattern of a part of the page; no other mark may stand in it."""
    return rf"(<!-- arena: {name} -->\n)(?:(?!<!-- arena: ).)*(<!-- arena: end -->)"


def save(path: Path, content: bytes) -> None:
    """Write the file in one go."""
    write_atomically(path, lambda file: file.write(content))


def results(comparison: Comparison) -> Iterator[str]:
    """Yield the findings, the table and the costs of each section."""
    yield f"{headline(comparison)}. Each row's settings: [settings.yaml]({PLACE}/settings.yaml)."
    yield f"![Differences to the baseline of each block.]({PLACE}/differences.png)"
    for section in comparison.sections:
        yield f"### {section.title or 'All runs'}"
        yield "\n".join(f"- {line}" for line in findings(section))
        heading, *body = report_rows(section)
        kept = [i for i, name in enumerate(heading) if name not in LEFT_OUT]
        yield markdown_table([[cells[i] for i in kept] for cells in (heading, *body)])


def findings(section: Section) -> Iterator[str]:
    """Yield a line for each difference that is shown, one on the others, and one on the lowest."""
    base = next(row for row in section.rows if row.name == section.baseline)
    silent = []
    for row in section.rows:
        if row.difference is None:
            continue
        if not row.difference.shown:
            silent.append(row.name)
            continue
        costs = ", ".join(cost_words(row, base))
        yield f"{shown_words(row.difference)}{f'; it {costs}' if costs else ''}."
    if silent:
        yield f"No difference to {base.name} is shown for {', '.join(silent)}."
    if section.leader is not None:
        yield first_words(section)


def picture(comparison: Comparison) -> bytes:
    """Draw each difference to the baseline with its interval; filled where it is shown."""
    names: dict[str, None] = {}
    for section in comparison.sections:
        names |= {row.name: None for row in reversed(section.rows) if row.difference}
    order = list(names)
    with rc_context(STYLE):
        return _drawn(comparison, order)


def _drawn(comparison: Comparison, order: Sequence[str]) -> bytes:
    """Draw the picture; `order` are the names of its rows, from the lowest up."""
    figure, axes = new_figure(extra=ROW_INCHES * max(0, len(order) - 12))
    axes.axvline(0, color=INK, linewidth=1)
    for i, section in enumerate(comparison.sections):
        offset = 0.15 * (len(comparison.sections) - 1 - 2 * i)
        for row in section.rows:
            d = row.difference
            if d is None:
                continue
            half = 0.0 if d.interval is None else d.interval[1] - d.mean
            axes.errorbar(
                d.mean,
                order.index(row.name) + offset,
                xerr=half,
                color=COLOURS[i],
                marker="os"[i % 2],
                markerfacecolor=COLOURS[i] if d.shown else "none",
                markersize=5,
                elinewidth=1,
                capsize=2,
                linestyle="none",
                label=f"{section.title or 'All runs'}, against {section.baseline}",
            )
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_xlim(*_reach(comparison))
    axes.set_xlabel("loss minus the baseline's (nats); left is better")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=1)
    return draw(figure, "differences", "Differences to the baseline", "").png


def _reach(comparison: Comparison) -> tuple[float, float]:
    """Return the ends of the picture: one wide interval must not crowd all the others."""
    known = [row.difference for section in comparison.sections for row in section.rows]
    means = [0.0, *(d.mean for d in known if d is not None)]
    beyond = WIDER * (max(means) - min(means)) or 0.1
    return min(means) - beyond, max(means) + beyond


def settings_text(comparison: Comparison) -> str:
    """Return as YAML the settings that all rows share, and each row's own."""
    rows = [(section, row) for section in comparison.sections for row in section.rows]
    every = [row.runs[0].settings for _, row in rows]
    shared = {k: v for k, v in every[0].items() if all(own.get(k) == v for own in every)}
    node: dict[str, object] = {
        "shared by all": {key: _plain(value) for key, value in sorted(shared.items())}
    }
    for section, row in rows:
        own = {k: _plain(v) for k, v in sorted(row.runs[0].settings.items()) if k not in shared}
        seeds = {"seeds": [run.seed for run in row.runs]}
        title = section.title or "all runs"
        table = node.setdefault(title, {})
        assert isinstance(table, dict)
        table[row.name] = seeds | own
    return yaml.safe_dump(node, sort_keys=False, allow_unicode=True)


def _plain(value: str) -> object:
    """Return a setting's value from its words: None, a truth value, a number, or the words."""
    if value in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[value]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(value)
    return value


if __name__ == "__main__":
    raise SystemExit(ended(main))
