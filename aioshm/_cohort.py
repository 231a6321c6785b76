"""`Cohort`: which of its host's ranks this process is, as its launcher says, and what their region is called.

Nothing is guessed: a wrong local world size would not fail, it would give every rank a region of its own that looks
right. So whatever is missing or does not fit together is an error that names the variables.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from ._errors import CohortEnvironmentError
from ._request import check_ranks

_PURPOSE = re.compile(r"(?=.{1,50}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASHED = re.compile(r".*-[0-9a-f]{16}")
_MAX_RESTART = 10**9


class Ranks(TypedDict):
    """The two arguments of `open_region` that come from a cohort."""

    local_rank: int
    local_world_size: int


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Which of its host's ranks this process is, and what tells them from all other processes of the host.

    All ranks of one host have the same `job`, `node` and `restart`; those of no other cohort have all three.

    Attributes:
        local_rank: This process's rank among those of this host, from 0.
        local_world_size: How many ranks there are on this host (not on all hosts together).
        job: The job's id; no two jobs that may run on one host at the same time have the same.
        node: Which of the job's nodes this is. Several may stand on one machine, as in tests.
        restart: How often the launcher has started the ranks of this job anew.

    Example:
        ```python
        cohort = aioshm.Cohort.from_env()
        async with aioshm.open_region(cohort.region_name("kv"), 64 << 30, **cohort.ranks) as region:
            ...
        ```
    """

    local_rank: int
    local_world_size: int
    job: str
    node: int | str = 0
    restart: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError where a field makes no sense."""
        rank, world = _check_both_ranks(self.local_rank, self.local_world_size)
        object.__setattr__(self, "local_rank", rank)
        object.__setattr__(self, "local_world_size", world)
        _check_identity(self.job, self.node, self.restart)

    @property
    def ranks(self) -> Ranks:
        """Local rank and local world size by name, for `open_region(..., **cohort.ranks)`."""
        return {"local_rank": self.local_rank, "local_world_size": self.local_world_size}

    def region_name(self, purpose: str) -> str:
        """Return the name of this cohort's region for `purpose`: the same on all its ranks, and on nobody else.

        Nodes, jobs and purposes never share a name. Nor does a restart share it with the start before, whose ranks may
        still be dying: they would hold their local ranks, and the new ones get RankInUseError. What a start leaves
        behind that was killed all at once before it was released is therefore not found by the next one.

        Args:
            purpose: What the region is for, such as `"kv"`: 1 to 50 of the characters `A-Z a-z 0-9 _ -`, in parts
                with a dot between them.

        Returns:
            `purpose.job.n<node>.r<restart>`. A job or node with other characters, or longer than 64, is shortened and
            gets a hash.

        Raises:
            ValueError: `purpose` has other characters.
        """
        if not _PURPOSE.fullmatch(purpose):
            raise ValueError(f"purpose must be 1 to 50 of A-Z a-z 0-9 _ - . (no dot first, last or twice): {purpose!r}")
        # No part but the purpose has a dot in it, so no two of these are the same text.
        return f"{purpose}.{_plain(self.job)}.n{_plain(str(self.node))}.r{self.restart}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Cohort:
        """Read what torchrun, Open MPI's mpirun or Slurm's srun tell each process that they start.

        Launchers nest, and the innermost counts, for it started this process: torchrun in a task of srun, torchrun in
        a process of mpirun, mpirun in a Slurm job. An empty variable is as good as none.

        Args:
            environ: The variables; None: those of this process.

        Returns:
            The cohort. `job` begins with the launcher's name.

        Raises:
            CohortEnvironmentError: No launcher set any, one is missing or no number, or they contradict each other:
                within one launcher; torchrun and mpirun where both started several processes here, so that either
                may be the inner one; or a LOCAL_RANK that torchrun did not set.
        """
        variables = {name: value for name, value in (os.environ if environ is None else environ).items() if value}
        torchrun, open_mpi = _read_torchrun(variables), _read_open_mpi(variables)
        if torchrun and open_mpi and open_mpi.local_world_size > 1:
            # One process of mpirun per node is an agent. Several may be agents or ranks, and nothing here says which.
            # Refused also where both happen to say the same, or some of the ranks would wait for the others in vain.
            raise CohortEnvironmentError(
                reason=f"this is {_say(torchrun)} by torchrun but {_say(open_mpi)} by Open MPI, and either may have "
                "started the other (unset the variables of the outer one)",
                launchers=("torchrun", "Open MPI"),
            )
        # Slurm is always the outermost: srun starts torchrun's agents and mpirun's daemons, one per node, whose
        # children find the agent's SLURM_LOCALID in their environment and not one of their own.
        cohort = torchrun or open_mpi or _read_slurm(variables)
        if torchrun is None:
            _check_hand_made(variables, cohort, launcher="Open MPI" if open_mpi else "Slurm")
        if cohort is None:
            if "SLURM_JOB_ID" in variables:
                raise CohortEnvironmentError(
                    reason="SLURM_JOB_ID is set but SLURM_STEP_ID is not, so this is the job's own script and no task "
                    "of srun"
                )
            raise CohortEnvironmentError(
                reason="neither torchrun (LOCAL_RANK, TORCHELASTIC_RUN_ID) nor Open MPI (OMPI_COMM_WORLD_LOCAL_RANK) "
                "nor Slurm (SLURM_LOCALID, SLURM_STEP_ID) has set its variables"
            )
        return cohort


Cohort.__module__ = "aioshm"


def _read_torchrun(variables: Mapping[str, str]) -> Cohort | None:
    """Read torchrun's variables; None: it did not start this process.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    read = _Reader("torchrun", variables)
    rank, world, node = read.number("LOCAL_RANK"), read.number("LOCAL_WORLD_SIZE"), read.number("GROUP_RANK")
    # With --virtual-local-rank LOCAL_RANK is 0 for all. Where all nodes have as many ranks, the global one tells.
    if {"RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"} <= variables.keys():
        everywhere = read.number("WORLD_SIZE") == read.number("GROUP_WORLD_SIZE") * world
        if everywhere and read.number("RANK") != node * world + rank:
            raise read.error(
                f"RANK={variables['RANK']} is local rank {read.number('RANK') - node * world} of node {node}, but "
                f"LOCAL_RANK={rank}: run torchrun without --virtual-local-rank"
            )
    run_id = variables["TORCHELASTIC_RUN_ID"]
    if run_id == "none":  # what all have who gave no --rdzv-id; no two of them have one master port at a time
        run_id = f"none-{read.text('MASTER_ADDR')}-{read.number('MASTER_PORT')}"
    return read.cohort(
        rank=rank,
        world=world,
        job=f"torchrun-{run_id}",
        node=node,
        # A change of membership is not counted, but then too the agent reaps its old ranks before it starts new ones.
        restart=read.number("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _read_open_mpi(variables: Mapping[str, str]) -> Cohort | None:
    """Read Open MPI's variables; None: it did not start this process.

    https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html

    OMPI_COMM_WORLD_NODE_RANK is no node's index, but a rank on this node counted over all jobs. Local ranks are by
    host, so the host's name is the node's: containers that share a directory are told apart. PMIx sets it, and the
    job's id, for every process it starts (PMIx_server_setup_fork); before PMIx, Open MPI set the id itself.
    """
    if not {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"} & variables.keys():
        return None
    read = _Reader("Open MPI", variables)
    job = variables.get("PMIX_NAMESPACE") or read.text("OMPI_MCA_ess_base_jobid")
    return read.cohort(
        rank=read.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        world=read.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=f"mpi-{job}",
        node=variables.get("PMIX_HOSTNAME", 0),
    )


def _read_slurm(variables: Mapping[str, str]) -> Cohort | None:
    """Read Slurm's variables; None: this process is no task of srun.

    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES

    SLURM_LOCALID alone means nothing: the job's script has one too (0). A step is what srun makes.
    """
    if "SLURM_STEP_ID" not in variables:
        return None
    read = _Reader("Slurm", variables)
    node = read.number("SLURM_NODEID")
    # SLURM_TASKS_PER_NODE and SLURM_NTASKS_PER_NODE may be the job's and not this step's (srun --preserve-env, -n).
    figures = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    figure = next((name for name in figures if name in variables), figures[0])
    world = read.number(figure) if figure == "SLURM_NTASKS_PER_NODE" else _count_tasks(read, figure, node)
    return read.cohort(
        rank=read.number("SLURM_LOCALID"),
        world=world,
        job=f"slurm-{read.number('SLURM_JOB_ID')}-{read.number('SLURM_STEP_ID')}",
        node=node,
        restart=read.number("SLURM_RESTART_COUNT", default=0),  # a job that was requeued keeps its id
    )


def _count_tasks(read: _Reader, figure: str, node: int) -> int:
    """Return how many tasks the node has by a list as `2(x3),1`: three nodes with two each, then one with one."""
    text, first = read.text(figure), 0
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if not found:
            raise read.error(f"{figure}={text!r} is no list of tasks per node")
        first += int(found[2] or 1)
        if node < first:
            return int(found[1])
    raise read.error(f"{figure}={text!r} has only {first} nodes, but SLURM_NODEID={node}")


def _check_hand_made(variables: Mapping[str, str], cohort: Cohort | None, *, launcher: str) -> None:
    """Look at a LOCAL_RANK or LOCAL_WORLD_SIZE that torchrun did not set: by a wrapper script, or another launcher.

    A launcher that is unknown here and runs in one task of srun per node would otherwise make each of its ranks the
    only one of a cohort.
    """
    read = _Reader("torchrun", variables)
    found = {name: read.number(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in variables}
    if not found:
        return
    said = ", ".join(f"{name}={value}" for name, value in found.items())
    if cohort is None:
        raise read.error(f"there is {said} but no TORCHELASTIC_RUN_ID, so nothing says which job this is")
    real = {"LOCAL_RANK": cohort.local_rank, "LOCAL_WORLD_SIZE": cohort.local_world_size}
    if found != {name: real[name] for name in found}:
        raise read.error(f"there is {said} without torchrun, but this is {_say(cohort)} by {launcher}")


class _Reader:
    """One launcher's variables, and its errors."""

    def __init__(self, launcher: str, variables: Mapping[str, str]) -> None:
        self._launcher = launcher
        self._variables = variables

    def error(self, reason: str) -> CohortEnvironmentError:
        return CohortEnvironmentError(reason=reason, launchers=(self._launcher,))

    def text(self, name: str) -> str:
        if name not in self._variables:
            raise self.error(f"{name} is not set, though {self._launcher} started this process")
        return self._variables[name]

    def number(self, name: str, *, default: int | None = None) -> int:
        if default is not None and name not in self._variables:
            return default
        text = self.text(name)
        if not re.fullmatch(r"[0-9]{1,10}", text):
            raise self.error(f"{name}={text!r} is no number")
        return int(text)

    def cohort(self, *, rank: int, world: int, job: str, node: int | str, restart: int = 0) -> Cohort:
        try:
            return Cohort(local_rank=rank, local_world_size=world, job=job, node=node, restart=restart)
        except ValueError as error:
            raise self.error(f"what {self._launcher} says makes no cohort: {error}") from error


def _check_both_ranks(local_rank: object, local_world_size: object) -> tuple[int, int]:
    if local_rank is None or local_world_size is None:
        raise TypeError("local_rank and local_world_size must be ints: a cohort has both")
    return check_ranks(local_rank, local_world_size)


def _check_identity(job: object, node: object, restart: object) -> None:
    if not isinstance(job, str):
        raise TypeError(f"job must be a str, not {type(job).__name__}")
    if not isinstance(node, (int, str)) or isinstance(node, bool):
        raise TypeError(f"node must be an int or a str, not {type(node).__name__}")
    if not isinstance(restart, int) or isinstance(restart, bool):
        raise TypeError(f"restart must be an int, not {type(restart).__name__}")
    if job == "" or node == "":
        raise ValueError("job and node must not be empty: they tell this cohort from others")
    if not 0 <= restart <= _MAX_RESTART:
        raise ValueError(f"restart must be 0 to {_MAX_RESTART}, not {restart}")


def _say(cohort: Cohort) -> str:
    return f"local rank {cohort.local_rank} of {cohort.local_world_size}"


def _plain(text: str) -> str:
    """Return `text` as part of a name, with no dot in it: itself, or what is left of it and a hash of all of it.

    A text that only looks as if it had been shortened gets a hash too, or it could be another one's.
    """
    if _PLAIN.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{re.sub('[^A-Za-z0-9_-]', '_', text)[:47]}-{digest[:16]}"
