"""Checkpoints that somebody else made: nothing in them runs, and no config names code."""

import cProfile
import io
import os
import pickle
import runpy
import shutil
import subprocess
import tempfile
import time
import timeit
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra.utils
import numpy as np
import pytest
import torch
import yaml
from hostile_files import checkpoint_of, in_zip
from support import train

from gptattn.errors import CheckpointError
from gptattn.runs.checkpoint import read_checkpoint
from gptattn.runs.saved import load_run
from gptattn.settings.targets import ForeignTarget
from gptattn.training.saving import AtomicCheckpointIO


class Payload:
    """Calls `call` with `arguments` when it is unpickled without care."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def code(canary: str) -> str:
    return f"__import__('os').mkdir({canary!r})"


# Each makes the canary, as the test shows by running it.
CALLS: dict[str, Callable[[str], Payload]] = {
    "os.mkdir": lambda c: Payload(os.mkdir, c),
    "os.makedirs": lambda c: Payload(os.makedirs, c),
    "os.system": lambda c: Payload(os.system, f"mkdir '{c}'"),
    "os.open": lambda c: Payload(os.open, c, os.O_CREAT | os.O_WRONLY),
    "os.symlink": lambda c: Payload(os.symlink, "/", c),
    "os.spawnlp": lambda c: Payload(os.spawnlp, os.P_WAIT, "mkdir", "mkdir", c),
    "subprocess.call": lambda c: Payload(subprocess.call, ["mkdir", c]),
    "subprocess.run": lambda c: Payload(subprocess.run, ["mkdir", c]),
    "subprocess.check_output": lambda c: Payload(subprocess.check_output, ["mkdir", c]),
    "subprocess.getoutput": lambda c: Payload(subprocess.getoutput, f"mkdir '{c}'"),
    "eval": lambda c: Payload(eval, code(c)),
    "exec": lambda c: Payload(exec, code(c)),
    "os.mknod": lambda c: Payload(os.mknod, c),
    "os.mkfifo": lambda c: Payload(os.mkfifo, c),
    "shutil.copyfile": lambda c: Payload(shutil.copyfile, __file__, c),
    "shutil.copytree": lambda c: Payload(
        shutil.copytree, str(Path(__file__).parents[2] / ".ci"), c
    ),
    "tempfile.mkdtemp": lambda c: Payload(tempfile.mkdtemp, "", Path(c).name, str(Path(c).parent)),
    "shutil.copy": lambda c: Payload(shutil.copy, __file__, c),
    "zipfile.ZipFile": lambda c: Payload(zipfile.ZipFile, c, "w"),
    "sqlite3.connect": lambda c: Payload(eval, f"__import__('sqlite3').connect({c!r}).close()"),
    "numpy.save": lambda c: Payload(np.save, c, 1),
    "torch.save": lambda c: Payload(torch.save, 1, c),
    "timeit.timeit": lambda c: Payload(timeit.timeit, code(c), "pass", timeit.default_timer, 1),
    "cProfile.run": lambda c: Payload(cProfile.run, code(c), os.devnull),
    "urllib's urlretrieve": lambda c: Payload(
        urllib.request.urlretrieve, Path(__file__).as_uri(), c
    ),
    "pickle.loads": lambda c: Payload(pickle.loads, pickle.dumps(Payload(os.mkdir, c))),
    "hydra's instantiate": lambda c: Payload(
        hydra.utils.instantiate, {"_target_": "os.mkdir", "path": c}
    ),
    "runpy.run_path": lambda c: Payload(runpy.run_path, script(c)),
}


def script(canary: str) -> str:
    file = Path(canary).with_name("script.py")
    file.write_text(code(canary))
    return str(file)


def legacy(path: Path, canary: str) -> None:
    torch.save(
        {"state_dict": Payload(os.mkdir, canary)}, path, _use_new_zipfile_serialization=False
    )


def newer_protocol(path: Path, canary: str) -> None:
    torch.save({"state_dict": Payload(os.mkdir, canary)}, path, pickle_protocol=4)


def entries(canary: str) -> dict[str, bytes]:
    content = pickle.dumps({"state_dict": Payload(os.mkdir, canary)}, 2)
    return {"archive/data.pkl": content, "archive/version": b"3\n", "archive/byteorder": b"little"}


def as_script(path: Path, canary: str) -> None:
    in_zip(path, {**entries(canary), "archive/constants.pkl": entries(canary)["archive/data.pkl"]})


def array(canary: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Payload(os.mkdir, canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


# The same call, in other wrappings.
FORMS: dict[str, Callable[[Path, str], object]] = {
    "torch's old form": legacy,
    "protocol 4": newer_protocol,
    "a bare pickle": lambda path, c: path.write_bytes(pickle.dumps(Payload(os.mkdir, c))),
    "compressed": lambda path, c: in_zip(path, entries(c), zipfile.ZIP_DEFLATED),
    "a TorchScript archive": as_script,
    "an array of objects": lambda path, c: in_zip(path, {"archive/data.pkl": array(c)}),
    "in the optimizer's states": lambda path, c: torch.save(
        {"state_dict": {}, "optimizer_states": [{"state": {0: Payload(os.mkdir, c)}}]}, path
    ),
    "in a callback's state": lambda path, c: torch.save(
        {"state_dict": {}, "callbacks": {"Samples": [(Payload(os.mkdir, c),)]}}, path
    ),
}

# Plain values, by which load_from_checkpoint or Hydra would make objects.
TRICKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "_instantiator": lambda c: {"hyper_parameters": {"_instantiator": "os.mkdir", "path": c}},
    "_class_path": lambda c: {"hyper_parameters": {"_class_path": "os.mkdir", "path": c}},
    "hparams_name": lambda c: {"hparams_name": "path", "hparams_type": "os.mkdir"},
    "a datamodule's": lambda c: {"datamodule_hyper_parameters": {"path": c}},
    "_target_ in a callback": lambda c: {
        "callbacks": {"Samples": {"_target_": "os.mkdir", "path": c}}
    },
    "class_path in a list": lambda c: {"loops": [{"a": ({"class_path": "os.mkdir"},)}]},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def refused(run: Path) -> Iterator[str]:
    """What each way of reading says of the run's checkpoint; one line each."""
    for read in (
        lambda: read_checkpoint(checkpoint_of(run)),
        lambda: AtomicCheckpointIO().load_checkpoint(checkpoint_of(run), weights_only=False),
        lambda: load_run(run),
    ):
        start = time.process_time()
        with pytest.raises(CheckpointError) as error:
            read()
        assert time.process_time() - start < 1
        assert "\n" not in str(error.value)
        yield str(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_in_a_pickle_is_made(name: str, run: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary.npy"
    payload = CALLS[name](str(canary))
    content = torch.load(checkpoint_of(run), weights_only=True)  # noqa: TID251
    torch.save(content | {"more": payload}, checkpoint_of(run))
    assert all("cannot be read (it asks for" in line for line in refused(run))
    assert not list(tmp_path.glob("canary*"))
    # The payload works: unpickled without care, it makes the canary.
    pickle.loads(pickle.dumps(payload))
    assert list(tmp_path.glob("canary*"))


@pytest.mark.parametrize("name", FORMS)
def test_no_other_form_of_file_gets_a_call_made(name: str, run: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    FORMS[name](checkpoint_of(run), str(canary))
    assert all("cannot be read (" in line for line in refused(run))
    assert not canary.exists()


@pytest.mark.parametrize("name", TRICKS)
def test_a_checkpoint_names_no_class(name: str, run: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content = torch.load(checkpoint_of(run), weights_only=True)  # noqa: TID251
    torch.save(content | TRICKS[name](str(canary)), checkpoint_of(run))
    assert all("which our checkpoints have not" in line for line in refused(run))
    assert not canary.exists()


def test_there_are_forty_payloads() -> None:
    assert len(CALLS) + len(FORMS) + len(TRICKS) >= 40


def test_a_run_folder_allows_itself_no_package(run: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["attn"] = {"_target_": "subprocess.Popen", "args": ["mkdir", str(canary)]}
    config["allow_targets"] = ["subprocess"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ForeignTarget, match=r"attn\._target_: subprocess\.Popen is outside of"):
        load_run(run)
    assert not canary.exists()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a.ckpt", "s3://bucket/a.ckpt"])
def test_no_address_is_fetched(address: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        AtomicCheckpointIO().load_checkpoint(address)
