"""Draws the README's figure: the 23 rows of the track that people ask for most.

Intervals and verdicts are those of the whole table (docs/track.md).
"""

from dataclasses import replace
from pathlib import Path

from gptattn.compare.plots import draw_track
from gptattn.compare.track import Entry, make_track, read_shipped
from gptattn.machine.disk import write_atomically

ROOT = Path(__file__).parents[1]
NAMES = """
recipe=lfm2; recipe=gemma3; mamba2 position=none; kda position=none; short_conv position=none;
gated_deltanet position=none; recipe=gpt_oss; recipe=kimi_linear; recipe=qwen3_next;
sliding; nsa; mha part=[conv]; mha part=[xsa]; mha part=[qk_norm]; differential; mha (placebo);
mha part=[sink]; gqa; mqa; mla; recipe=deepseek_v3; dsa; lightning position=none
"""


def draw() -> bytes:
    """Return the figure as PNG. Raises KeyError for a name that the table lacks."""
    track = make_track([], read_shipped(ROOT / "benchmarks/track", Entry))
    rows = {track.label(row.entry): row for row in track.rows}  # the best first
    names = " ".join(NAMES.split()).split("; ")
    chosen = sorted((rows[name] for name in names), key=[*rows.values()].index)
    return draw_track(replace(track, rows=chosen)).png


if __name__ == "__main__":
    png = draw()
    write_atomically(ROOT / "docs/front.png", lambda file: file.write(png))
