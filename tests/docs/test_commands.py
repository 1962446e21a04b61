"""Every command in README.md and docs/ is run, and the Python in them compiles."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_pass.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)

# Commands in blocks without "console", and who runs them.
ELSEWHERE = {
    'pip install -e ".[hf]"': "CI installs the test extra, which contains it",
    'pip install -e ".[test]"': ".ci/run",
    'pip install -e ".[bench]"': "tests/test_packaging.py reads the extras",
    "python -m fusion_pass demo": "tests/cli/test_demo.py",
    "python -m pytest": ".ci/run",
    "python -m pytest -s tests/models/test_transformers.py -k no_worse": ".ci/run, as part of the suite",
    "python -m benchmarks all": "needs a GPU",
}


def blocks(language):
    return [(page.name, text) for page in PAGES for kind, text in FENCED.findall(page.read_text()) if kind == language]


def console_commands():
    lines = [line for _, text in blocks("console") for line in text.splitlines()]
    return list(dict.fromkeys(line[2:] for line in lines if line.startswith("$ ")))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder that looks like the checkout; what commands write stays out of it."""
    for name in ("examples", "tools", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("command", console_commands())
def test_console_command(command, folder, capsys):
    words = shlex.split(command)
    assert words[0] == "python", "commands in the docs start with python"
    if words[1:3] == ["-m", "fusion_pass"]:
        assert main(words[3:]) == 0, capsys.readouterr()
        return
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *words[1:]], env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_explain_wrote_the_page(folder, capsys):
    (command,) = [c for c in console_commands() if ":example --html" in c]
    assert main(shlex.split(command)[3:]) == 0
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_other_commands_are_accounted_for():
    plain = [line for _, text in blocks("") for line in text.splitlines() if re.match(r"python|pip|fusion-pass", line)]
    assert plain and set(plain) <= set(ELSEWHERE), set(plain) - set(ELSEWHERE)
    for _, text in blocks("console"):
        assert all(line.startswith("$ ") for line in text.splitlines()), "one command a line"


def test_python_compiles():
    found = blocks("python")
    assert len(found) >= 4
    for page, text in found:
        compile(text, page, "exec")


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_files_exist():
    for page in PAGES:
        for path in re.findall(r"`((?:fusion_pass|patterns|kernels|tests|tools|benchmarks|examples)/[\w/.*-]*)`",
                               page.read_text()):
            if "NAME" not in path and path != "benchmarks/results/":
                assert list(ROOT.glob(path.rstrip("/"))), f"{page.name}: {path}"


def test_named_tests_exist():
    """Rows of the table of fusions name test functions, not only files."""
    rows = re.findall(r"`(tests/[\w/]+\.py)` \(([^)]*)\)", (ROOT / "docs" / "fusions.md").read_text())
    assert len(rows) >= 5
    for path, names in rows:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(test_\w+)`", names):
            assert f"def {name}(" in text, f"{path}: {name}"


def test_plain_example_runs():
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "plain_attention.py")], timeout=600, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0 and "1 fused" in done.stdout, done.stderr[-2000:]
    assert float(done.stdout.rsplit(maxsplit=1)[-1]) < 0.05
