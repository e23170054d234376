"""Each generated mistake quickly gives one line and exit code 2, and leaves nothing behind.

The same 60 mistakes each time; `GPTATTN_CONFIGS=300` makes 300, which take about a minute.
"""

import contextlib
import io
import os
import tempfile
import time
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from support import command, tiny

# hypothesis keeps files between runs: keep them outside of the repository.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "gptattn-hypothesis")
COUNT = int(os.environ.get("GPTATTN_CONFIGS", "60"))
SECONDS = 3.0
WHOLE = str.split(
    "seed batch_size accumulate log_every model.num_layers model.num_heads model.d_model "
    "model.context_length model.d_mlp model.vocab_size budget.steps budget.default_steps "
    "validation.count sample.tokens sample.top_k trainer.threads loss_chunk_tokens sweep.jobs"
)
REAL = str.split(
    "optim.lr optim.eps optim.grad_clip optim.beta1 optim.beta2 optim.weight_decay "
    "optim.warmup_fraction optim.final_lr_fraction model.dropout validation.fraction "
    "sample.temperature"
)
NUMBERS = [*WHOLE, *REAL]
GROUPS = str.split("attn model position data tokenizer optim trainer experiment launcher")
OPEN = ["attn", "position", "data", "tokenizer"]  # groups whose keys depend on their _target_
NODES = [*GROUPS[:7], "budget", "validation", "sample", "sweep"]

# Words that cannot be read as a number, a boolean or an interpolation.
word = st.from_regex(r"zq[a-z_]{1,12}", fullmatch=True)
# Whatever a terminal can pass, including invalid UTF-8, which Python shows as surrogates.
anything = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from("\udc80\udcff\r\n\x0b\x1b\x85\u2028\u202e'\"\\$={}[](),:~@"),
    min_size=1,
    max_size=40,
)
deep = st.integers(1, 500).flatmap(
    lambda depth: st.sampled_from(
        ["[" * depth + "]" * depth, "{a:" * depth + "1" + "}" * depth, "[" * depth, "${" * depth]
    )
)
long = st.integers(200, 9000).flatmap(lambda n: st.sampled_from(["x" * n, "9" * n, "zq x" * n]))
interpolation = st.one_of(
    word.map("${{{}}}".format),
    word.map("${{oc.env:{}}}".format),
    word.map("${{{}:1}}".format),
    st.sampled_from(["${hydra:runtime}", "${run_name:}", "${model}", "${..}", "'${'", "${seed}${"]),
)
no_number = st.one_of(
    word, deep, long, interpolation, st.sampled_from(["{a:1}", "''", "1e", "--3", "???", "٣", "on"])
)


def near(name: str) -> st.SearchStrategy[str]:
    """Return misspelt names: with an extra letter, or with two letters exchanged."""
    at = st.integers(name.rfind(".") + 1, len(name) - 1)
    return st.one_of(
        at.map(lambda i: f"{name[:i]}q{name[i:]}"),
        at.map(lambda i: f"{name[: i - 1]}{name[i]}{name[i - 1]}{name[i + 1 :]}").filter(
            lambda other: other not in NUMBERS and ".." not in other and other[0] != "."
        ),
    )


def setting(names: list[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.tuples(st.sampled_from(names), values).map(lambda pair: ["=".join(pair)])


one = st.one_of(
    # Types and ranges
    setting(WHOLE, st.one_of(no_number, st.integers(max_value=-1).map(str))),
    setting(WHOLE, st.sampled_from(["0.5", "nan", "inf", "-inf", "1e999", "true", "1.0"])),
    setting(WHOLE, st.integers(min_value=2**62, max_value=10**999).map(str)),
    setting(REAL, st.one_of(no_number, st.floats(max_value=-1e-9).map(str))),
    setting(REAL, st.sampled_from(["nan", "inf", "-inf", "1e999", "null", "-1e-300"])),
    setting(["compile", "checkpoint", "sweep.fresh", "attn.out_proj"], word),
    setting(["attn.scale"], st.sampled_from(["0", "-1", "nan", "inf", "zq", "9" * 400])),
    setting(["trainer.precision", "attn.backend", "match", "init_method"], word),
    setting(["trainer.accelerator"], word),
    setting(["experiment_name"], st.sampled_from(["..", "a/../../b", "/etc/zq", "''", "a" * 300])),
    setting(["experiment_name"], anything.map(lambda text: f"'\t{text}")),
    setting(["allow_targets", "choices", *NODES[7:]], word),
    # Keys
    setting(["zq", *NODES], word).map(lambda pair: [pair[0].replace("=", ".") + "=1"]),
    st.sampled_from(NUMBERS).flatmap(near).map(lambda name: [f"{name}=1"]),
    st.tuples(word, anything).map(lambda pair: ["=".join(pair)]),
    st.tuples(long, word).map(lambda pair: ["=".join(pair)]),
    # Groups
    setting(GROUPS, word),
    setting(
        GROUPS, st.sampled_from(["../attn/mha", "/etc/passwd", "..", "a\\b", "[mha]", "a" * 300])
    ),
    setting([f"{group}@{group}.zq" for group in GROUPS], st.sampled_from(["mha", "tiny", "zq"])),
    # Names of code
    setting([f"{group}._target_" for group in OPEN], st.sampled_from(["os.system", "gptattn.zq"])),
    setting([f"{group}._target_" for group in OPEN], st.one_of(word, interpolation, deep)),
    setting([f"+{group}._target_" for group in ("model", "optim", "zq")], word),
    setting([f"+{group}.zq._target_" for group in OPEN], st.just("os.system")),
    setting([f"+attn._{key}_" for key in ("args", "partial", "recursive", "convert")], word),
    # Syntax
    setting(NUMBERS, anything.map(lambda text: f"[{text}")),
    setting([f"{sign}{name}" for sign in ("+", "~") for name in NUMBERS], word),
    st.sampled_from(NODES).map(lambda node: [f"~{node}"]),
    st.sampled_from(["=", "=1", "+", "++", "~", "+=1", "++=", "@=1", "a", "seed", "seed@a=1"]).map(
        lambda override: [override]
    ),
    setting(WHOLE, st.sampled_from(["1,2", "range(1,3)", "choice(1,2)", "glob(*)", "sort(2,1)"])),
    word.map(lambda flag: [f"--{flag}"]),
    # Hydra's own
    setting(
        ["hydra.run", "hydra.job", "hydra.sweeper", "hydra.launcher", "hydra.runtime", "hydra"],
        st.one_of(st.just("null"), word),
    ),
    setting(
        ["hydra.run.dir"], st.one_of(interpolation, st.sampled_from(["", "null", "???", "[a]"]))
    ),
    setting(["hydra.job.env_copy", "hydra.searchpath"], word.map("[{}]".format)),
    setting(["hydra.mode", "hydra.job.chdir", "hydra/job_logging", "hydra.callbacks"], word),
    setting(["hydra.launcher._target_", "hydra.sweeper._target_"], word),
    word.map(lambda name: ["--config-name", name]),
    word.map(lambda name: ["--cfg", "job", "--package", name]),
    # Values that contradict those of `tiny`
    setting(["budget.tokens", "budget.seconds", "budget.flops"], st.integers(1, 999).map(str)),
    setting(["model.num_heads", "accumulate"], st.sampled_from(["3", "5", "6", "7"])),
    setting(["model.d_model"], st.integers(1, 500).map(lambda n: str(2 * n + 1))),
    setting(["attn.num_kv_heads"], st.sampled_from(["3", "0", "-1", "8", "null"])).map(
        lambda kv: ["attn=gqa", *kv]
    ),
    setting(["model.context_length", "model.vocab_size"], st.sampled_from(["4000", "200"])).map(
        lambda size: [*size, "model.vocab_size=255"]
    ),
    # Sweeps
    setting(WHOLE, st.sampled_from(["range(3,1)", "range(0,1e9)", "range(1,2,0)", "zq,1"])).map(
        lambda sweep: ["-m", *sweep]
    ),
    setting(["max_batch_size", "params", "uptrain"], word).map(
        lambda kind: ["-m", "seed=1,2", f"hydra.sweeper.{kind[0]}"]
    ),
)


@pytest.mark.slow
@settings(
    max_examples=COUNT,
    phases=[Phase.generate],  # no shrinking: it takes minutes
    derandomize=True,  # the same examples each time
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(one, min_size=1, max_size=2).map(lambda found: [*chain(*found)]))
def test_a_generated_mistake_is_one_line(mistakes: list[str]) -> None:
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(said):
        folder = Path(name)
        start = time.process_time()
        code = command(folder, *tiny(folder), *mistakes)
        seconds = time.process_time() - start
        # A token file in the cache may stay: it is complete and of use to the next run.
        left = {path for path in folder.rglob("*") if path.suffix != ".tokens"}
        left -= {folder / "text.txt", folder / "cache"}
    (line,) = said.getvalue().splitlines()
    assert line.startswith("error: ")
    assert not line.startswith("error: internal")
    assert len(line) < 1000
    assert code == 2
    assert seconds < SECONDS
    assert not left
