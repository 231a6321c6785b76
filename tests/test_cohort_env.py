"""`Cohort`: read from what torchrun, Open MPI and Slurm set, and nothing guessed; names that only one cohort has."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioshm
from aioshm import Cohort, CohortEnvironmentError

# As each of them sets it, for local rank 1 of 2 on the second node.
TORCHRUN = {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-head-4711@1",
    "PMIX_HOSTNAME": "node2",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "8(x2)",  # the job's, kept by srun --preserve-env
    "SLURM_NTASKS_PER_NODE": "8",
}
# One task of srun or process of mpirun per node, which starts the ranks' own launcher.
SLURM_AGENT = {**SLURM, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
OPEN_MPI_AGENT = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
SLURM_SCRIPT = {key: SLURM[key] for key in ("SLURM_JOB_ID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE")} | {
    "SLURM_LOCALID": "0"
}

AS_TORCHRUN = Cohort(local_rank=1, local_world_size=2, job="torchrun-job7", node=1)
AS_OPEN_MPI = Cohort(local_rank=1, local_world_size=2, job="mpi-prterun-head-4711@1", node="node2")
AS_SLURM = Cohort(local_rank=1, local_world_size=2, job="slurm-1234-0", node=1)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def refused(environ: dict[str, str]) -> CohortEnvironmentError:
    with pytest.raises(CohortEnvironmentError) as caught:
        Cohort.from_env(environ)
    return caught.value


@pytest.mark.parametrize(
    ("environ", "cohort"),
    [
        (TORCHRUN, AS_TORCHRUN),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}, dataclasses.replace(AS_TORCHRUN, restart=3)),
        (without(TORCHRUN, "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"), AS_TORCHRUN),
        # Nodes with 2 and 3 ranks: the global rank says nothing about the local one.
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "5"}, dataclasses.replace(AS_TORCHRUN, local_world_size=3)),
        (
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
            dataclasses.replace(AS_TORCHRUN, job="torchrun-none-127.0.0.1-29400"),
        ),
        (OPEN_MPI, AS_OPEN_MPI),
        (
            without(OPEN_MPI, "PMIX_NAMESPACE", "PMIX_HOSTNAME") | {"OMPI_MCA_ess_base_jobid": "3141271553"},
            dataclasses.replace(AS_OPEN_MPI, job="mpi-3141271553", node=0),
        ),
        (SLURM, AS_SLURM),
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, dataclasses.replace(AS_SLURM, restart=2)),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, dataclasses.replace(AS_SLURM, job="slurm-1234-4294967290")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,2(x3)"}, AS_SLURM),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": ""}, dataclasses.replace(AS_SLURM, local_world_size=8)),
        (without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), dataclasses.replace(AS_SLURM, local_world_size=8)),
        (
            without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") | {"SLURM_NTASKS_PER_NODE": "4"},
            dataclasses.replace(AS_SLURM, local_world_size=4),
        ),
        (SLURM_AGENT, dataclasses.replace(AS_SLURM, local_rank=0, local_world_size=1)),
    ],
)
def test_each_launcher_is_read(environ, cohort):
    assert Cohort.from_env({"PATH": "/bin", **environ}) == cohort


@pytest.mark.parametrize(
    ("outer", "inner", "cohort"),
    [
        (SLURM_AGENT, TORCHRUN, AS_TORCHRUN),
        (SLURM, TORCHRUN, AS_TORCHRUN),  # two agents per node: still agents, as nobody calls srun in a rank
        (SLURM_SCRIPT, TORCHRUN, AS_TORCHRUN),
        (SLURM | {"SLURM_LOCALID": "x"}, TORCHRUN, AS_TORCHRUN),
        (OPEN_MPI_AGENT, TORCHRUN, AS_TORCHRUN),
        (SLURM_AGENT, OPEN_MPI, AS_OPEN_MPI),
        (SLURM_AGENT, OPEN_MPI_AGENT | TORCHRUN, AS_TORCHRUN),
    ],
)
def test_innermost_launcher_counts(outer, inner, cohort):
    assert Cohort.from_env({**outer, **inner}) == cohort


@pytest.mark.parametrize("ranks", [{}, {"LOCAL_RANK": "1"}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}])
@pytest.mark.parametrize(("environ", "cohort"), [(SLURM, AS_SLURM), (OPEN_MPI, AS_OPEN_MPI)], ids=["srun", "mpirun"])
def test_wrapper_that_sets_local_rank_as_the_launcher_does_is_no_contradiction(environ, cohort, ranks):
    assert Cohort.from_env({**environ, **ranks}) == cohort


@pytest.mark.parametrize(
    ("environ", "said", "launchers"),
    [
        ({}, "neither torchrun (", ()),
        ({"PATH": "/bin", "LOCAL_RANK": ""}, "neither torchrun (", ()),
        (SLURM_SCRIPT, "SLURM_STEP_ID is not, so this is the job's own script", ()),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=0, LOCAL_WORLD_SIZE=2 but no TORCHELASTIC_RUN_ID",
            1,
        ),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set, though torchrun started this process", 1),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set", 1),
        (without(TORCHRUN, "GROUP_RANK"), "GROUP_RANK is not set", 1),
        (TORCHRUN | {"LOCAL_RANK": "one"}, "LOCAL_RANK='one' is no number", 1),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is no number", 1),
        (TORCHRUN | {"LOCAL_RANK": "\u0661"}, "LOCAL_RANK='\u0661' is no number", 1),
        (
            TORCHRUN | {"LOCAL_RANK": "2", "RANK": "4"},
            "local_rank must be 0 to 1 where local_world_size is 2, not 2",
            1,
        ),
        (
            without(TORCHRUN, "RANK") | {"LOCAL_WORLD_SIZE": "1025"},
            "local_world_size must be at most 1024, not 1025",
            1,
        ),
        (TORCHRUN | {"LOCAL_RANK": "0"}, "RANK=3 is local rank 1 of node 1, but LOCAL_RANK=0: run torchrun without", 1),
        (
            without(TORCHRUN, "MASTER_PORT") | {"TORCHELASTIC_RUN_ID": "none"},
            "MASTER_PORT is not set, though torchrun started this process",
            1,
        ),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE is not set", 2),
        (without(OPEN_MPI, "PMIX_NAMESPACE"), "OMPI_MCA_ess_base_jobid is not set, though Open MPI started", 2),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local_rank must be 0 to 1", 2),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, "local_world_size must be greater than 0", 2),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set, though Slurm started this process", 4),
        (without(SLURM, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set", 4),
        (SLURM | {"SLURM_LOCALID": "2"}, "local_rank must be 0 to 1 where local_world_size is 2, not 2", 4),
        (SLURM | {"SLURM_NODEID": "2"}, "'2(x2)' has only 2 nodes, but SLURM_NODEID=2", 4),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2"}, "SLURM_STEP_TASKS_PER_NODE='2(x2' is no list", 4),
        (SLURM | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 without torchrun, but this is local rank 1 of 2 by Slurm", 1),
        # An unknown launcher in one task of srun per node: without the error all its ranks would be alone.
        (SLURM_AGENT | {"LOCAL_RANK": "3"}, "LOCAL_RANK=3 without torchrun, but this is local rank 0 of 1 by Slurm", 1),
        (
            OPEN_MPI | {"LOCAL_WORLD_SIZE": "4"},
            "LOCAL_WORLD_SIZE=4 without torchrun, but this is local rank 1 of 2 by",
            1,
        ),
        # Two agents by mpirun, or mpirun in each of two ranks: nothing tells, even where both say the same.
        (OPEN_MPI | TORCHRUN, "local rank 1 of 2 by torchrun but local rank 1 of 2 by Open MPI", 3),
        (
            OPEN_MPI | TORCHRUN | {"LOCAL_RANK": "0", "RANK": "2"},
            "local rank 0 of 2 by torchrun but local rank 1 of 2",
            3,
        ),
    ],
)
def test_what_is_missing_or_contradicts_is_named(environ, said, launchers):
    error = refused(environ)
    assert said in error.reason
    assert error.reason in str(error)
    assert str(error).endswith("aioshm.Cohort(local_rank=..., local_world_size=..., job=...).")
    bits = {"torchrun": 1, "Open MPI": 2, "Slurm": 4}
    assert error.launchers == tuple(name for name, bit in bits.items() if (launchers or 0) & bit)
    assert isinstance(error, aioshm.AioshmError)
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_without_an_argument_this_process_is_meant(monkeypatch):
    for name in (*TORCHRUN, *OPEN_MPI, *SLURM):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CohortEnvironmentError, match="neither torchrun"):
        Cohort.from_env()
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert Cohort.from_env() == AS_SLURM


@given(st.lists(st.tuples(st.integers(1, 1024), st.integers(1, 5)), min_size=1, max_size=6), st.data())
def test_list_of_tasks_per_node_is_read_for_each_node(runs, data):
    tasks = [count for count, nodes in runs for _ in range(nodes)]
    text = ",".join(f"{count}(x{nodes})" if nodes > 1 else f"{count}" for count, nodes in runs)
    node = data.draw(st.integers(0, len(tasks) - 1))
    environ = SLURM | {"SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": text}
    assert Cohort.from_env(environ).local_world_size == tasks[node]
    assert f"has only {len(tasks)} nodes" in refused(environ | {"SLURM_NODEID": str(len(tasks))}).reason


# Few characters, so that two texts are often nearly the same: plain ones, and those that no name can hold.
TEXTS = st.text("a-0.n/ \n\xe9\udc80", min_size=1, max_size=80)
VALUES = st.one_of(st.integers(0, 5).map(str), st.sampled_from(["", "x", "-1", "2(x3),1", "none", "1e3"]), TEXTS)


@given(
    st.dictionaries(st.sampled_from(sorted({*TORCHRUN, *OPEN_MPI, *SLURM})), VALUES, max_size=12),
    st.sampled_from([{}, TORCHRUN, OPEN_MPI, SLURM]),
)
def test_any_environment_gives_a_cohort_that_makes_sense_or_the_error(variables, base):
    try:
        cohort = Cohort.from_env({**base, **variables})
    except CohortEnvironmentError:
        return
    assert 0 <= cohort.local_rank < cohort.local_world_size <= 1024
    aioshm.open_region(cohort.region_name("kv"), 1 << 20, **cohort.ranks)  # checked at the call; nothing is opened


def make(job: str = "7", node: int | str = 0, restart: int = 0, *, rank: int = 0) -> Cohort:
    return Cohort(local_rank=rank, local_world_size=2, job=job, node=node, restart=restart)


def test_name_says_whose_region_it_is():
    assert AS_TORCHRUN.region_name("kv") == "kv.torchrun-job7.n1.r0"
    assert AS_SLURM.region_name("kv") == "kv.slurm-1234-0.n1.r0"
    assert re.fullmatch(r"kv\.mpi-prterun-head-4711_1-[0-9a-f]{16}\.nnode2\.r0", AS_OPEN_MPI.region_name("kv"))


def test_nodes_jobs_and_restarts_on_one_machine_have_names_of_their_own():
    changes = {"GROUP_RANK": ("0", "1"), "TORCHELASTIC_RUN_ID": ("a", "b"), "TORCHELASTIC_RESTART_COUNT": ("0", "1")}
    environs = [
        without(TORCHRUN, "RANK") | dict(zip(changes, values, strict=True))
        for values in itertools.product(*changes.values())
    ]
    names = [Cohort.from_env(environ).region_name(purpose) for environ in environs for purpose in ("kv", "weights")]
    assert len(set(names)) == len(names) == 16
    names = [
        {Cohort.from_env({**environ, "LOCAL_RANK": rank}).region_name("kv") for rank in ("0", "1")}
        for environ in environs
    ]
    assert all(len(name) == 1 for name in names)  # the ranks of one cohort do share it


IDENTITIES = st.tuples(TEXTS, st.one_of(st.integers(0, 20), TEXTS), st.one_of(st.integers(0, 2), st.just(10**9)))
PURPOSES = st.lists(st.text("a-0nr", min_size=1, max_size=9), min_size=1, max_size=5).map(".".join)


@given(IDENTITIES, PURPOSES)
def test_every_name_is_one_that_open_region_takes(identity, purpose):
    name = make(*identity).region_name(purpose)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name)
    assert ".." not in name
    assert name == make(*identity, rank=1).region_name(purpose)


def test_no_two_cohorts_share_a_name():
    # Out of few pieces, so that many are the same text with its borders elsewhere.
    pieces = [parts for count in (1, 2) for parts in itertools.product(("a", "n0", "r0"), repeat=count)]
    texts = sorted({joint.join(parts) for parts in pieces for joint in (".", "-")})
    names = {
        make(job, node, restart).region_name(purpose)
        for purpose, job, node, restart in itertools.product(texts, texts, [0, *texts], (0, 1))
    }
    assert len(names) == len(texts) ** 2 * (len(texts) + 1) * 2 == 21 * 21 * 22 * 2


def test_job_that_looks_like_a_shortened_one_is_another():
    long = "/" + "x" * 300
    shortened = make(long).region_name("kv").split(".")[1]
    assert len(shortened) == 64
    assert make(shortened).region_name("kv") != make(long).region_name("kv")
    assert make("x" * 64).region_name("kv") == f"kv.{'x' * 64}.n0.r0"
    assert len(make("x" * 65, "y" * 65, 10**9).region_name("p" * 50)) <= 200


@pytest.mark.parametrize("purpose", ["", ".", ".kv", "kv.", "k..v", "k v", "k/v", "é", "kv\n", "x" * 51])
def test_purpose_that_no_name_can_hold_is_refused(purpose):
    with pytest.raises(ValueError, match="purpose must be"):
        make().region_name(purpose)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"local_rank": 2}, ValueError),
        ({"local_rank": -1}, ValueError),
        ({"local_rank": None}, TypeError),
        ({"local_rank": None, "local_world_size": None}, TypeError),
        ({"local_rank": "0"}, TypeError),
        ({"job": ""}, ValueError),
        ({"job": 7}, TypeError),
        ({"node": ""}, ValueError),
        ({"node": 1.0}, TypeError),
        ({"node": True}, TypeError),
        ({"restart": -1}, ValueError),
        ({"restart": 10**9 + 1}, ValueError),
        ({"restart": "1"}, TypeError),
    ],
)
def test_cohort_made_by_hand_is_checked(wrong, kind):
    with pytest.raises(kind):
        dataclasses.replace(make(), **wrong)


def test_cohort_is_a_value():
    assert make() == make()
    assert len({make(), make(), make(rank=1)}) == 2
    assert pickle.loads(pickle.dumps(AS_OPEN_MPI)) == AS_OPEN_MPI
    assert Cohort.__module__ == "aioshm"
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().local_rank = 1  # type: ignore[misc]
