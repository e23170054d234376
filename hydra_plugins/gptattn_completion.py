"""Tab completion as Hydra has it, and also of lists and of paths from here: `attn=mha,` and
`resume=outputs/`.

Hydra imports this folder before it completes. Of two plugins for one shell it takes neither, so
what all of its plugins ask is replaced.
"""

import re

from hydra.plugins.completion_plugin import CompletionPlugin

FLAGS = ("-m", "--multirun", "--debug")
# Values that begin like a path are Hydra's own to complete.
LIST = re.compile(r"([\w./@+]+=)([^./].*,)([^,]*)")
PATH = re.compile(r"((?:resume|init_from|data\.path|tokenizer\.path|cache_dir)=)(.+)")

_ask_hydra = CompletionPlugin._query


def _query(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
    """What the last word of the line can become; `line` is without the program's name."""
    words = [word for word in line.split() if word not in FLAGS]
    word = words.pop() if words and not line[-1].isspace() else ""
    if path := PATH.fullmatch(word):
        name, start = path.groups()
        here = "" if start[0] in "./" else "./"
        files = self.complete_files(here + start)
        return sorted(name + file.removeprefix(here) for file in files)
    name, given, start = match.groups() if (match := LIST.fullmatch(word)) else ("", "", word)
    # As a sweep, since words before this one may be lists as well.
    found = _ask_hydra(self, config_name, " ".join(["-m", *words, name + start]))
    rest = [one.removeprefix(name) for one in found]
    return [name + given + one for one in rest if one not in given.split(",")]


CompletionPlugin._query = _query
