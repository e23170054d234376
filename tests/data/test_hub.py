"""Names on the hub: the requests, and the messages when the hub does not answer. No network."""

from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub import errors
from support import refuses

from gptattn.data.hub import local_folder

FILES = ("config.json", "model.safetensors")


@pytest.fixture
def download(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The function that asks the hub."""
    download = mock.Mock()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


def test_a_name_is_fetched_with_only_the_files_that_are_needed(download):
    download.return_value = "fetched"
    assert local_folder("hf:openai-community/gpt2", "init_from", FILES) == Path("fetched")
    assert local_folder("hf:a.b/c_d@refs/pr/2", "path", FILES) == Path("fetched")
    assert local_folder("hf/x", "init_from", FILES) == Path("hf/x")  # whether it exists or not
    for name in ("hf:", "hf:gpt2", "hf:a/b/c", "hf:a b/c", "hf:a/b@", "hf:../x/y"):
        with refuses("init_from: not a name"):
            local_folder(name, "init_from", FILES)
    assert download.call_args_list == [
        mock.call("openai-community/gpt2", revision=None, allow_patterns=[*FILES]),
        mock.call("a.b/c_d", revision="refs/pr/2", allow_patterns=[*FILES]),
    ]


def test_a_failure_is_one_line_with_exit_code_4(download):
    download.side_effect = errors.LocalEntryNotFoundError("no route\nand more")
    with refuses("init_from: (LocalEntryNotFoundError: no route)", 4):
        local_folder("hf:owner/other@v9", "init_from", FILES)
