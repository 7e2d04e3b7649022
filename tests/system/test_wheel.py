"""The wheel and the sdist that a package index would get, tried in an environment of their own."""

from __future__ import annotations

import stat
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
HERE = Path(sysconfig.get_path("purelib"))
RUN = [
    "run", "--name", "first", "--data.name", "glyphs", "--partition.name", "classes",
    "--partition.clients", "3", "--method.name", "fl_proto", "--method.local_steps", "1",
    "--run.rounds", "1", "--episode.query", "5", "--model.backbone.width", "8",
    "--test.episodes", "20", "--test.validation_episodes", "10",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def checked(words: list[str | Path], **options: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    checked([*hatchling, "-t", "sdist"], cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    checked([*hatchling, "-t", "wheel"], cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the Python of an environment with the wheel, which only root may write to.

    It takes the dependencies from the environment of the tests, without its `fedshot`.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(checked([python, "-c", question]).strip())
    (site / "main.pth").write_text(f"{HERE}\n", encoding="utf-8")
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(site)
    places = [site, *site.rglob("*")]
    for place in places:
        place.chmod(place.stat().st_mode & ~0o222)
    yield python
    for place in places:
        place.chmod(place.stat().st_mode | stat.S_IWUSR)


def test_twine_and_the_index_accept_both(built: tuple[Path, Path]) -> None:
    pytest.importorskip("twine")
    assert checked([sys.executable, "-m", "twine", "check", *built]).count("PASSED") == 2
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        text = wheel.read(name).decode().partition("\n\n")[2]
    pytest.importorskip("comrak", reason="readme-renderer[md] is not installed")
    from readme_renderer.markdown import render

    html = render(text)
    assert html is not None
    assert html.count("<table>") == text.count("\n|---|")
    assert html.count("<pre") == text.count("```") / 2


def test_neither_has_results_pages_or_tests(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive, zipfile.ZipFile(wheel) as packed:
        inside = {name.split("/")[1] for name in archive.getnames() if "/" in name}
        assert inside == {
            ".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md",
            "constraints.txt", "examples", "hatch_build.py", "pyproject.toml", "src",
        }  # fmt: skip
        tops = {name.split("/")[0] for name in packed.namelist()}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"fedshot"}
    assert sdist.stat().st_size < 2**20


def test_the_wheel_trains_tests_and_predicts_without_compiler_home_or_cache(
    installed: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environment = {
        "PATH": str(tmp_path / "no compiler"), "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    before = files(installed.parents[1])

    def fedshot(*words: str) -> str:
        program = [installed, "-P", "-m", "fedshot", *words]
        return checked(program, cwd=work, env=environment)

    question = "import fedshot; print(fedshot.__file__)"
    where = checked([installed, "-P", "-c", question], cwd=work, env=environment)
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    assert "on novel classes" in fedshot(*RUN)
    assert "on novel classes" in fedshot("evaluate", "runs/first", "--shot", "5")
    fedshot("report", "runs/first")
    assert (work / "runs" / "first" / "report.html").stat().st_size > 100_000
    assert "digits" in fedshot("reproduce", "list")
    for place in ("examples/dark", "examples/light", "pictures"):
        (work / place).mkdir(parents=True)
        for i in range(2):
            image = Image.new("L", (28, 28), 40 * i if place.endswith("dark") else 215 + 40 * i)
            image.save(work / place / f"{i}.png")
    asked = fedshot("predict", "runs/first", "--support", "examples", "--query", "pictures")
    assert asked.count(".png,") == 2
    assert files(installed.parents[1]) == before
