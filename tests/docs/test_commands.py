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

# Commands that this file does not run, and what does.
ELSEWHERE = {
    'pip install -e ".[hf]"': ("tools/newcomer.py", "CI installs the test extra, which contains it"),
    'pip install -e ".[test]"': (".ci/run", ""),
    'pip install -e ".[bench]"': ("tests/test_packaging.py", "reads the extras"),
    "python -m fusion_pass demo": ("tests/cli/test_demo.py", ""),
    "python -m fusion_pass explain": ("tests/cli/test_cli.py", ""),
    "python -m fusion_pass explain FILE.py:FUNCTION": ("tests/cli/test_cli.py", ""),
    "python -m fusion_pass explain examples/plain_attention.py:example": ("tools/newcomer.py", "below, with --html"),
    "python -m pytest": (".ci/run", ""),
    "python tools/plots.py": ("tests/docs/test_plots.py", ""),
    "python -m pytest -s tests/models/test_transformers.py -k no_worse": ("tests/models/test_transformers.py", ""),
    "torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --inner aot_eager": (
        "tests/scale_out/test_tensor_parallel.py", "with fewer layers"),
}
# Commands that need a GPU: their programs are asked for help, which has to know every word of them.
ASKED = {
    "python -m benchmarks all": "python -m benchmarks",
    "python -m benchmarks chain": "python -m benchmarks",
    "python -m benchmarks decode_graphs --profile": "python -m benchmarks",
    "python -m benchmarks._tune_merge --json sweep.json --table kernels/tuning/merge_sm90.py":
        "python -m benchmarks._tune_merge",
    "python tools/sanitize.py": "python tools/sanitize.py",
    "torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --size flash --prefill 2048 8192 "
    "--decode 1 32 --cuda-graph": "python examples/tensor_parallel.py",
}
PROGRAM = re.compile(r"(?:python (?!-m venv)|pip |torchrun |fusion-pass |coverage )\S")


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


def plain_commands():
    """Commands in blocks without a language, and in the text; the coverage run is the table's own."""
    lines = [line for _, text in blocks("") for line in text.splitlines()]
    spans = [span for page in PAGES for span in re.findall(r"`([^`\n]+)`", FENCED.sub("", page.read_text()))]
    return {words for words in (*lines, *spans) if PROGRAM.match(words) and not words.startswith("coverage run")}


def test_other_commands_are_accounted_for():
    plain = plain_commands() - set(console_commands())
    assert plain == set(ELSEWHERE) | set(ASKED), plain ^ (set(ELSEWHERE) | set(ASKED))
    assert all((ROOT / path).is_file() for path, _ in ELSEWHERE.values())
    for _, text in blocks("console"):
        assert all(line.startswith("$ ") for line in text.splitlines()), "one command a line"


@pytest.mark.parametrize("program", sorted(set(ASKED.values())))
def test_programs_know_the_words_of_their_commands(program):
    words = shlex.split(program)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *words[1:], "--help"], env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for command in (c for c, asked in ASKED.items() if asked == program):
        given = shlex.split(command.split(words[-1], 1)[1])
        named = [word for word in given if word.startswith("--") or program == "python -m benchmarks"]
        known = set(re.findall(r"[\w-]+", done.stdout))
        assert set(named) <= known, f"{command}: {set(named) - known}"


def test_the_coverage_run_names_files():
    (tests,) = re.findall(r"`coverage run -m pytest ([^`]+)`", (ROOT / "docs" / "contributing.md").read_text())
    assert all((ROOT / name).exists() for name in tests.split())


def test_python_compiles():
    found = blocks("python")
    assert len(found) >= 4
    for page, text in found:
        compile(text, page, "exec")


def test_the_transformers_snippet_runs(tmp_path, capsys):
    """As it stands in the README, on a CPU and without Inductor, from a checkpoint with random weights."""
    pytest.importorskip("transformers", minversion="5.8")
    import fusion_pass
    from fusion_pass.models import random_deepseek_v4

    (snippet,) = [text for _, text in blocks("python") if "AutoModelForCausalLM" in text]
    quick = 'backend="fusion_pass", options={"inner": "eager"})'
    for words, here in (('"cuda"', '"cpu"'), ('backend="fusion_pass")', quick)):
        assert words in snippet
        snippet = snippet.replace(words, here)
    random_deepseek_v4("tiny", layer_types=["compressed_sparse_attention"]).save_pretrained(tmp_path)
    before, names = len(fusion_pass.reports()), {"checkpoint": str(tmp_path)}
    exec(compile(snippet, "README.md", "exec"), names)
    made = fusion_pass.reports()[before:]
    assert names["tokens"].shape == (1, 26) and "fused      fmha" in capsys.readouterr().out
    assert len(made) >= 3 and all(len(report.fused) == 1 and not report.near_misses for report in made), made


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
