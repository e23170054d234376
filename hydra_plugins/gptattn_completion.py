"""Hydra's tab completion, extended to lists (`attn=mha,` and `part=[gate,`) and to relative paths
(`resume=outputs/`).

Hydra imports this folder before it completes. If a shell has two plugins, it uses neither, so this
module adds none; it replaces the method that all of Hydra's own plugins call.
"""

import re

from hydra.plugins.completion_plugin import CompletionPlugin

FLAGS = ("-m", "--multirun", "--debug")
# Hydra itself completes values that begin like a path.
LIST = re.compile(r"([\w./@+]+=)([^./].*,)([^,]*)")
NAMES = re.compile(r"(part|logger|pattern)=((?:.*,)?\[(?:[^][]*,)?)([^][,]*)")  # an open bracket
PATH = re.compile(r"((?:resume|init_from|data\.path|tokenizer\.path|cache_dir)=)(.+)")

_ask_hydra = CompletionPlugin._query


def _query(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
    """Return the completions of the last word of `line`, which lacks the program's name."""
    words = [word for word in line.split() if word not in FLAGS]
    word = words.pop() if words and not line[-1].isspace() else ""
    if path := PATH.fullmatch(word):
        name, start = path.groups()
        here = "" if start[0] in "./" else "./"
        files = self.complete_files(here + start)
        return sorted(name + file.removeprefix(here) for file in files)
    if names := NAMES.fullmatch(word):
        key, given, start = names.groups()
        group = "attn" if key == "pattern" else key
        found = _ask_hydra(self, config_name, " ".join(["-m", *words, f"{group}={start}"]))
        rest = [one.removeprefix(f"{group}=") for one in found]
        taken = given.rpartition("[")[2].split(",") if key != "pattern" else []
        return [f"{key}={given}{one}" for one in rest if one not in taken]
    name, given, start = match.groups() if (match := LIST.fullmatch(word)) else ("", "", word)
    # With -m, because earlier words may be lists as well.
    found = _ask_hydra(self, config_name, " ".join(["-m", *words, name + start]))
    rest = [one.removeprefix(name) for one in found]
    return [name + given + one for one in rest if one not in given.split(",")]


CompletionPlugin._query = _query
