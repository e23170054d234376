# pyright: reportMissingImports=false
"""An mkdocs hook: runs each notebook in docs/ and turns its cells and outputs into a page.

`make docs` calls it. An error in a cell ends the build. Keeps SVG, Markdown and text outputs.
"""

from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

SECONDS = 600  # time limit of a cell


def on_files(files: Files, config: Any) -> Files:
    """Replace each notebook with a page and its pictures."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        for page in pages(Path(file.abs_src_path), file.src_uri.removesuffix(".ipynb"), config):
            files.append(page)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to a notebook at the page built from it."""
    return markdown.replace(".ipynb)", ".md)")


def pages(source: Path, name: str, config: Any) -> list[File]:
    """Return the notebook as Markdown, then its pictures. Raises PluginError if a cell fails."""
    notebook: Any = nbformat.read(source, as_version=4)
    kernel = KernelManager(kernel_name="python3", transport="ipc")
    try:
        NotebookClient(notebook, km=kernel, timeout=SECONDS).execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise PluginError(f"{source.name}: {error}") from None
    finally:
        kernel.shutdown_kernel(now=True)
    text: list[str] = []
    pictures: list[File] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text.append(cell.source)
            continue
        text.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/svg+xml" in data:
                picture = f"{name}_{len(pictures) + 1}.svg"
                svg = File.generated(config, picture, content=data["image/svg+xml"])
                pictures.append(svg)
                text.append(f"![What the cell above draws]({Path(picture).name})")
            elif "text/markdown" in data:
                text.append(data["text/markdown"])
            else:
                text.append(f"```text\n{output.get('text') or data.get('text/plain', '')}\n```")
    return [File.generated(config, f"{name}.md", content="\n\n".join(text)), *pictures]
