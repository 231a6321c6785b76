from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # with pip: only pip's configuration knows of some test wheels
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
# A newcomer's machine has one Python and the others are skipped; on CI a missing one is a failure.
nox.options.error_on_missing_interpreters = "CI" in os.environ

PYPROJECT = nox.project.load_toml("pyproject.toml")
PROJECT = PYPROJECT["project"]
PYTHONS = nox.project.python_versions(PYPROJECT)
OLDEST, NEWEST = PYTHONS[0], PYTHONS[-1]
group = functools.partial(nox.project.dependency_groups, PYPROJECT)

ROOT = Path(__file__).parent
DIST = ROOT / ".nox" / "dist"
COVERAGE = ROOT / ".nox" / ".coverage"  # dotted: the plain name is the `coverage` session's environment
CONSTRAINTS = ROOT / "constraints.txt"
# What another kernel may answer differently, less what takes long there and what it answers twice.
VM_TESTS = ("vm", "test_memory_guard.py", "test_populate.py", "test_cut_short.py", "test_pace.py")
VM_TESTS += ("test_locks.py", "test_mapping.py")
VM_LEFT_OUT = "waiting_ranks or only_the_creator or sibling or chain or 3-try or 3-off or than_processors or very_end"
VM_LEFT_OUT += " or of_a_period"
CHECKED = ("aioshm", "examples", "tests", "benchmarks", "docs", "noxfile.py")


def existing(*names: str) -> list[str]:
    """Leave out what this checkout does not have."""
    return [name for name in names if (ROOT / name).exists()]


def install_wheel(session: nox.Session, *groups: str, extras: str = "", constraints: Path = CONSTRAINTS) -> None:
    """Install the built wheel and the groups; `extras` is written as in a requirement: "[cli]"."""
    (wheel,) = DIST.glob("*.whl")
    session.install("-c", str(constraints), f"{wheel}{extras}", *group(*groups))
    # pip takes a wheel of a version that is installed already for the same one.
    session.install("--force-reinstall", "--no-deps", str(wheel))


def run_pytest(session: nox.Session, *args: str, measured: bool = False) -> None:
    """Run the tests from their own folder, where `import aioshm` finds the installed wheel only.

    `measured` is with coverage; each process that a test starts pays for that.
    """
    session.chdir(ROOT / "tests")
    session.run(
        "python",
        "-c",
        "import aioshm, sysconfig;assert aioshm.__file__.startswith(sysconfig.get_path('purelib')), aioshm.__file__",
        silent=True,
    )
    arguments = ("-m", "pytest", *args, *session.posargs)
    if not measured:
        session.run("python", *arguments)
        return
    COVERAGE.mkdir(parents=True, exist_ok=True)
    COVERAGE.chmod(0o1777)  # tests that become another user write their data here too
    data = COVERAGE / session.name
    for old in COVERAGE.glob(f"{session.name}.*"):
        old.unlink()
    session.run(
        *("coverage", "run", f"--rcfile={ROOT / 'pyproject.toml'}"), *arguments, env={"COVERAGE_FILE": str(data)}
    )


@nox.session(tags=["checks"])
def lint(session: nox.Session) -> None:
    """Check style, formatting, spelling, configuration files and changelog fragments."""
    session.install(*group("lint"))
    # Directly, as pre-commit sees only what git tracks and a new file should not pass unseen.
    session.run("ruff", "check", *existing(*CHECKED))
    session.run("ruff", "format", "--check", *existing(*CHECKED))
    if (ROOT / ".git").exists():
        session.run(
            *("pre-commit", "run", "--all-files", "--show-diff-on-failure"),
            env={"SKIP": "ruff-check,ruff-format"},
        )
    session.run("towncrier", "build", "--draft")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the wheel, through the source distribution, that all other sessions install."""
    session.install("build")
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(DIST), silent=True)


@nox.session(python=OLDEST, tags=["checks"], requires=["build"])
def types(session: nox.Session) -> None:
    """Check types: mypy strict on the source, pyright's verifytypes on the installed wheel."""
    install_wheel(session, "types", extras="[cli]")
    session.run("mypy", *existing("aioshm", "examples", "tests/typing"))
    python = Path(session.bin) / "python"
    session.chdir(session.create_tmp())  # away from the source
    session.run(*("pyright", "--pythonpath", str(python), "--verifytypes", "aioshm", "--ignoreexternal"))


@nox.session(python=PYTHONS, requires=["build"])
def tests(session: nox.Session) -> None:
    """Test the wheel on every supported Python: the oldest at length and with coverage, the newest with coverage.

    Arguments after `--` go to pytest.
    """
    install_wheel(session, "test", extras="[cli]")
    selected = "not examples" if session.python == OLDEST else "not examples and not slow"
    run_pytest(session, "-m", selected, measured=session.python in (OLDEST, NEWEST))


@nox.session(python=NEWEST, tags=["checks"], requires=["build"])
def uvloop(session: nox.Session) -> None:
    """Test the wheel on uvloop, less the slow tests."""
    install_wheel(session, "test", "uvloop", extras="[cli]")
    run_pytest(session, "--loop=uvloop", "-m", "not slow and not examples")


@nox.session(python=OLDEST, tags=["checks"], requires=["build"])
def lowest(session: nox.Session) -> None:
    """Test the wheel with the lowest versions it claims to work with, less the slow tests."""
    extras = PROJECT["optional-dependencies"]
    floors = [
        f"{wanted.name}=={next(s.version for s in wanted.specifier if s.operator == '>=')}"
        for wanted in map(Requirement, [*PROJECT["dependencies"], *extras["cli"], *extras["numpy"]])
    ]
    pins = Path(session.create_tmp()) / "floors.txt"
    pins.write_text("\n".join(floors) + "\n", encoding="utf-8")
    without_torch = [r for r in group("test") if Requirement(r).name != "torch"]
    (wheel,) = DIST.glob("*.whl")
    session.install("-c", str(pins), f"{wheel}[cli,numpy]", *without_torch)
    session.install("--force-reinstall", "--no-deps", str(wheel))
    run_pytest(session, "-m", "not slow and not examples")


@nox.session(python=NEWEST, tags=["checks"], requires=["build"])
def vm(session: nox.Session) -> None:
    """Test the wheel on an emulated machine: cgroup v2, memory nodes, huge pages. Arguments after `--` go to pytest."""
    machine = ("python", str(ROOT / "tests" / "vm" / "machine.py"))
    reason = session.run(*machine, "--probe", silent=True)
    if reason:
        session.skip(str(reason).strip())
    install_wheel(session, "test", extras="[cli]")  # on this Python without torch, which would fill the disk
    selected = session.posargs or [*VM_TESTS, "-m", "not slow", "-k", f"not ({VM_LEFT_OUT})"]
    session.run(*machine, "--junit", str(ROOT / ".nox" / ".junit-vm.xml"), *selected)


@nox.session(python=OLDEST, tags=["checks"], requires=["build"])
def examples(session: nox.Session) -> None:
    """Run every example."""
    install_wheel(session, "test", "examples", extras="[cli]")
    run_pytest(session, "-m", "examples", measured=True)


@nox.session(tags=["checks"], requires=["build"])
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    install_wheel(session, "docs", extras="[cli]")
    out = ROOT / "docs" / "_build"
    session.run(
        *("sphinx-build", "--fresh-env", "--nitpicky", "--fail-on-warning", "--keep-going"),
        *("-b", "html", "docs", str(out / "html")),
    )


@nox.session(tags=["checks"])
def coverage(session: nox.Session) -> None:
    """Combine what the sessions before this one measured and report lines and branches."""
    data = [str(path) for path in COVERAGE.iterdir()] if COVERAGE.exists() else []
    if not data:
        session.skip("nothing was measured")
    session.install("coverage>=7.11")
    env = {"COVERAGE_FILE": str(COVERAGE.with_name(".coverage-combined"))}
    session.run("coverage", "combine", "--keep", "--quiet", *data, env=env)
    session.run("coverage", "report", env=env)


@nox.session(python=OLDEST, default=False, requires=["build"])
def bench(session: nox.Session) -> None:
    """Run the benchmarks and renew docs/benchmarks.md. Arguments after `--`: some of their names, --quick or --full."""
    install_wheel(session, "bench", extras="[cli]")
    session.install(*group("bench-built"), success_codes=[0, 1])
    # When interrupted they give back gigabytes, and remove what has a name, before they end.
    session.run("python", "benchmarks/run.py", *session.posargs, interrupt_timeout=30, terminate_timeout=10)
