"""A new user's path: convert, generate from both; and what a conversion changes."""

import re

from support import config, save_untrained

from gptattn.machine.console import make_printable
from gptattn.runs.load import load_run

FIXED = ("tokens=12", "seed=3", "threads=1", "device=cpu")


def test_a_new_users_path(tmp_path, call):
    mha = save_untrained(tmp_path / "mha", "attn=mha")
    code, out, _ = call("convert", f"from={mha}", "to=gqa", f"out={tmp_path / 'gqa'}")
    assert code == 0
    assert "mha -> gqa: logits at most" in out
    # Keys and values of one layer: width 16, 16 tokens, float32; then with half the heads.
    assert "cache of a full context: 2,048 -> 1,024 bytes" in out
    for folder, cache in ((mha, "128 .* 2,048"), (tmp_path / "gqa", "64 .* 1,024")):
        code, out, err = call("generate", f"run={folder}", "prompt=The line", *FIXED)
        assert code == 0
        # Streamed byte by byte, it is the text of all bytes at once.
        assert out == make_printable(load_run(folder).generate("The line", 12, seed=3))
        assert re.search(rf"[\d,]+ tokens/s, \w+, cache {cache} for 1 x 16 tokens", err)
    out = call("generate", f"run={mha}", "prompt=Line", "samples=3", *FIXED)[1]
    assert len({*out.split("\n---\n")}) == 3


def test_a_conversion_records_the_target_s_settings_and_no_pattern(tmp_path, call):
    run = save_untrained(tmp_path / "a", "pattern=[sliding,gqa]", "model.num_layers=2")
    code, _, _ = call("convert", f"from={run}", "to=mha", "to.window=5", f"out={tmp_path / 'b'}")
    assert code == 0
    record = config(tmp_path / "b")
    assert (record["pattern"], record["layers"]) == (None, {})
    assert (record["choices"]["attn"], record["attn"]["window"]) == ("mha", 5)
