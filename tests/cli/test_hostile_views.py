"""TensorBoard and attention.html with hostile text, names and values."""

import os
import re
import subprocess
import warnings
from argparse import ArgumentParser, Namespace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import SMALL, build_gpt, settings
from support import Call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.base_plugin import FlagsError
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gptattn.settings.compose import CONF
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.runs.folder import RunFolder
from gptattn.runs.save import save_model
from gptattn.training.recorder import RunRecorder

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from one of its dependencies
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.program import WerkzeugServer

ROOT = CONF.parent
LIVE = (
    '<a href="https://evil.example/"><img src="https://evil.example/p.png" onerror=alert(1)>x</a>'
)
# Every character that some program takes for a line break.
BREAKS = [
    "\n",
    "\r",
    "\r\n",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "\n\n\n",
    "\n\t\0",
]
TEXTS = [
    LIVE,
    *(f"a{line_break}{LIVE}{line_break}[x](https://evil.example/)" for line_break in BREAKS),
    "<script>alert(1)</script>\n\n<script src=//evil.example></script>",
    "```\n</code></pre><svg onload=alert(1)><iframe srcdoc='<script>1</script>'>\n```",
    "\n![x](https://evil.example/p.png)\n\n[x]: javascript:alert(1)\n[x]\n<https://evil.example/>",
    "<!-- \n--> <?x\n<![CDATA[<img src=x>]]>\n</td></tr></table><h1>x</h1>",
    "\x02klzzwxh:0000\x03\n\x02\n\x03<img src=x>\ufeff\n&lt;img src=x&gt;&#60;img src=x>",
    "<" * 50 + "img src=x>" + "\n\n|a|b|\n|-|-|\n|<img src=x>|[x](https://evil.example/)|",
    "1. a\n\n       <img src=x>\n\n- b\n  - <a href='data:text/html,x'>x</a>\n\n> <img src=x>",
]


class Page(HTMLParser):
    """Parses a page: its tags, their addresses and event handlers, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.acts: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.acts += [name for name, _ in attrs if name in ("href", "src", "srcdoc", "style")]
        self.acts += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_there_are_twenty_attempts() -> None:
    assert len(TEXTS) + len(PROMPTS) >= 20


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_inert_in_tensorboard(text: str, tmp_path: Path) -> None:
    recorder = RunRecorder(RunFolder(tmp_path))
    recorder.log_hyperparams({"attn": text, "attn_settings": text})
    for tag in ("sample/text", "match"):
        recorder.log_text(tag, text, 1)
    recorder.close(done=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag in ("sample/text", "match"):
        (event,) = events.Tensors(f"{tag}/text_summary")
        content = event.tensor_proto.string_val[0]
        for markdown in (True, False):
            page = Page(text_array_to_html(np.array([content], dtype=object), markdown))
            assert page.tags <= {"table", "tbody", "tr", "td", "pre", "code"}
            assert not page.acts
            assert "<script" not in page.text
        # All words of the text are still there.
        assert re.findall(r"\w+", content.decode()) == re.findall(r"\w+", text)
    # Hyperparameters are fields of a protobuf message, which the page shows as text.
    metadata = events.summary_metadata["_hparams_/session_start_info"]
    values = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    assert {value.string_value for value in values.values()} == {text}


# (prompt, name of the run folder)
PROMPTS = [
    (LIVE[:60], "<img src=x onerror=alert(1)>"),
    ("</script><script>alert(1)</script>", "<script>alert(1)<"),
    ('"};alert(1);//<!--<script>', '\'" onmouseover=alert(1) x="'),
    ("</pre><svg onload=alert(1)>\u2028\r\x85", "{{ 7 * 7 }}{% raw %}"),
    ("\\u003c/script\\u003e]]>\u202e\x00\x1b[2J", "a\u202e\x1b[31m\nb"),
]


@pytest.mark.parametrize(("prompt", "name"), PROMPTS)
def test_a_prompt_and_a_name_are_inert_in_the_page(
    prompt: str, name: str, tmp_path: Path, call: Call
) -> None:
    longer = (*SMALL, "attn=mha", "model.context_length=70")
    model = build_gpt(*longer, vocab_size=256, std=0.3)
    save_model(tmp_path / name, settings(*longer), model, ByteTokenizer())
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    ask = (f"run={tmp_path / name}", f"prompt_file={tmp_path / 'prompt.txt'}", "layer=0")
    assert call("attention_map", *ask, f"out={tmp_path / 'out'}", "device=cpu")[0] == 0
    source = (tmp_path / "out" / "attention.html").read_text(encoding="utf-8")
    page = Page(source)
    harmless = {"html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "pre"}
    harmless |= {"noscript", "strong", "main", "section", "canvas", "div", "table", "button", "br"}
    assert page.tags <= harmless | {"script"}
    assert source.count("<script") == source.count("</script>") == 2  # the data and our own code
    assert not page.acts
    assert "default-src 'none'" in source
    assert not set("\x1b\u202e\u2028\x85\r\0") & set(source)
    assert "49" not in Page(source.partition("<pre>")[0]).text


# TensorBoard must be reachable from this machine only.


def flags(*arguments: str) -> Namespace:
    """Parse the arguments as TensorBoard does."""
    loader, parser = CorePluginLoader(), ArgumentParser()
    loader.define_flags(parser)
    read = parser.parse_args(arguments)
    loader.fix_flags(read)
    return read


def served_on(read: Namespace) -> str:
    """Return the address that TensorBoard's server binds to."""
    read.port = 0
    server = WerkzeugServer(lambda *_: [], read)
    try:
        return server.socket.getsockname()[0]
    finally:
        server.server_close()


def board(*more: str) -> list[str]:
    """Return the arguments of TensorBoard in `make board`."""
    # What `make test ARGS=...` leaves in the environment is not for `make board`.
    env = {k: v for k, v in os.environ.items() if k not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")}
    done = subprocess.run(
        ["make", "--dry-run", "board", *more],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = re.findall(r"^\S*/tensorboard (.*)$", done.stdout, re.MULTILINE)
    return line.split()


def test_make_board_serves_this_machine_alone() -> None:
    read = flags(*board())
    assert read.host == "localhost"
    assert served_on(read) in ("127.0.0.1", "::1")
    with pytest.raises(FlagsError, match="--bind_all"):
        flags(*board("ARGS=--bind_all"))


def test_every_command_that_we_name_serves_this_machine_alone() -> None:
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("conf/**/*.yaml")]
    files += [file for folder in ("gptattn", "scripts") for file in ROOT.glob(f"{folder}/**/*.py")]
    found = [
        line
        for file in files
        for line in re.findall(r"tensorboard (--.*)", file.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 4  # including the line that a run prints
    assert not [line for line in found if "--bind_all" in line or "--host" in line]
    assert served_on(flags("--logdir", "outputs")) in ("127.0.0.1", "::1")
