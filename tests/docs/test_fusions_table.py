"""The table of docs/fusions.md: every row names tests that exist, one of them at least in CI's default run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fusions.md").read_text()


def rows():
    lines = PAGE[PAGE.index("## Sources"):PAGE.index("<!-- begin corpus")].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "source model or engine"]


def named_tests(cell):
    for path, names in re.findall(r"`(tests/[\w/]+\.py)` \(([^)]*)\)", cell):
        for name in re.findall(r"`(test_\w+)`", names):
            yield path, name


def marks(path, name):
    """Decorators of a test and of its module (``pytestmark``), as text; None where there is no such test."""
    tree = ast.parse((ROOT / path).read_text())
    found = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if found is None:
        return None
    # A parameter may be marked; then the others run.
    own = [ast.unparse(d) for d in found.decorator_list if "parametrize" not in ast.unparse(d)]
    module = [ast.unparse(n.value) for n in tree.body
              if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    return " ".join(own + module)


@pytest.mark.parametrize("row", rows(), ids=lambda row: re.sub(r"\W+", "-", row[0])[:40])
def test_every_row_is_a_test(row):
    assert len(row) == 4 and all(row)
    tests = list(named_tests(row[3]))
    assert tests, "no test is named"
    found = {f"{path}::{name}": marks(path, name) for path, name in tests}
    assert None not in found.values(), found
    in_ci = [name for name, decorators in found.items() if not re.search(r"mark\.(slow|gpu)\b", decorators)]
    assert in_ci, f"CI runs none of {list(found)}"


def test_the_check_can_fail():
    assert marks("tests/docs/test_fusions_table.py", "test_nothing_of_this_name") is None
    assert "slow" in marks("tests/export/test_aot_inductor.py", "test_static_tokens")
    assert "gpu" in marks("tests/models/test_cuda_graphs.py", "test_capture_by_hand")
    assert len(rows()) > 20
