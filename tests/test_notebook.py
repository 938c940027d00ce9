"""The notebook's code cells run in order, without Jupyter."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    results = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        *before, last = ast.parse(cell["source"]).body
        exec(compile(ast.Module(before, []), "notebook", "exec"), names)
        if isinstance(last, ast.Expr):
            results.append(repr(eval(compile(ast.Expression(last.value), "notebook", "eval"), names)))
        else:
            exec(compile(ast.Module([last], []), "notebook", "exec"), names)
    assert any("TrainedModel(" in result for result in results)
    assert any("surprisal" in result for result in results)
