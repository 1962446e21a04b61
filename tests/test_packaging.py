"""What gets installed: the wheel's contents, an installed package beside a checkout, and transformers in the checkout's
root.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(code, cwd, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("building a wheel without network needs setuptools >= 77 here")
    source = tmp_path_factory.mktemp("source")
    tracked = ["fusion_pass", "kernels", "patterns", "pyproject.toml", "README.md", "LICENSE"]
    for name in tracked:  # a copy: setuptools leaves build folders behind
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    out = tmp_path_factory.mktemp("wheel")
    build = "from setuptools.build_meta import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_wheel_has_the_three_packages_and_no_top_level_strangers(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"fusion_pass"}
    for needed in ("kernels/__init__.py", "patterns/__init__.py", "models/fp8_linear.py", "cli/demo.py", "py.typed"):
        assert f"fusion_pass/{needed}" in names
    in_checkout = {
        f"fusion_pass/{prefix}{path.relative_to(ROOT / folder).as_posix()}"
        for folder, prefix in (("fusion_pass", ""), ("kernels", "kernels/"), ("patterns", "patterns/"))
        for path in (ROOT / folder).rglob("*.py")
    }
    assert in_checkout <= set(names), "every module of the checkout is in the wheel"


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    read = {name.split("/")[-1]: name for name in archive.namelist() if ".dist-info/" in name}
    entry_points = archive.read(read["entry_points.txt"]).decode()
    assert "fusion_pass = fusion_pass.backend:fusion_pass" in entry_points
    assert "fusion-pass = fusion_pass.__main__:main" in entry_points
    assert "LICENSE" in read


def test_installed_wheel(wheel, tmp_path):
    """As installed: unpacked on the path, away from the checkout, found by its entry point."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import fusion_pass, fusion_pass.kernels, fusion_pass.patterns, torch\n"
        "from fusion_pass.models import FP8GroupedLinear\n"
        "run = torch.compile(lambda x: x + 1, backend='fusion_pass', options={'inner': 'eager'})\n"
        "assert run(torch.zeros(1)).item() == 1 and len(fusion_pass.reports()) == 1\n"
        "print(fusion_pass.kernels.__file__)"
    )
    path = python(code, tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert path == str(tmp_path / "site" / "fusion_pass" / "kernels" / "__init__.py")


def test_checkout_shadows_an_installed_wheel_as_a_whole(wheel, tmp_path):
    """Started in the checkout, all three packages come from it, never the pass from here and the kernels from there."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import fusion_pass, fusion_pass.kernels as k, fusion_pass.patterns as p\n"
        "print(fusion_pass.__file__, k.__file__, p.__file__)"
    )
    paths = python(code, ROOT, PYTHONPATH=str(tmp_path / "site")).split()
    assert paths == [str(ROOT / folder / "__init__.py") for folder in ("fusion_pass", "kernels", "patterns")]


def test_types(wheel, tmp_path):
    """``mypy --strict`` over the package as installed: the checkout's own folders are not where it looks."""
    pytest.importorskip("mypy")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    command = [sys.executable, "-m", "mypy", "--strict", "-p", "fusion_pass", "--cache-dir", str(tmp_path / "cache")]
    environment = {**os.environ, "MYPYPATH": str(site)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0 and "no issues found" in found.stdout, found.stdout[-3000:] + found.stderr[-500:]


def test_sub_packages_are_not_imported_twice():
    code = (
        "import sys, fusion_pass.kernels, fusion_pass.patterns\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('kernels', 'patterns')])"
    )
    assert python(code, ROOT) == "[]"


def test_transformers_in_the_root_of_the_checkout():
    """Hugging Face's `kernels` is an optional dependency of transformers: our folder of that name must do no harm."""
    pytest.importorskip("transformers")
    code = (
        "import kernels, patterns, sys\n"
        "assert not [name for name in dir(kernels) if not name.startswith('__')], dir(kernels)\n"
        "from transformers import DeepseekV4ForCausalLM\n"
        "import fusion_pass\n"
        "from fusion_pass.models import random_deepseek_v4\n"
        "print(type(random_deepseek_v4()).__name__)"
    )
    assert python(code, ROOT) == "DeepseekV4ForCausalLM"


def test_import_without_triton_or_gpu(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('no triton on this machine')")
    code = (
        "import fusion_pass, torch, sys\n"
        "from fusion_pass import compat\n"
        "run = torch.compile(lambda x: x + 1, backend='fusion_pass', options={'inner': 'aot_eager'})\n"
        "print(run(torch.zeros(1)).item(), 'triton' in sys.modules)"
    )
    assert python(code, ROOT, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="") == "1.0 False"


@pytest.mark.slow
def test_editable_install(tmp_path):
    """pip install -e in a fresh environment that sees this one's packages."""
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False, system_site_packages=False)
    interpreter = environment / "bin" / "python"
    site = subprocess.run(
        [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(site, "parent.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    source = tmp_path / "source"
    source.mkdir()
    for name in ("fusion_pass", "kernels", "patterns", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    install = [str(interpreter), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", str(source)]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        "import fusion_pass.kernels as k, torch\n"
        "run = torch.compile(lambda x: x + 1, backend='fusion_pass', options={'inner': 'eager'})\n"
        "print(run(torch.zeros(1)).item(), k.__file__)"
    )
    result = subprocess.run([str(interpreter), "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["1.0", str(source / "kernels" / "__init__.py")], result.stderr
