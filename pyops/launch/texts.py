"""What `pyops launch` writes: the words that start a run's ranks, one function for each launcher.

    Job -> torchrun_command   one command on each node
           mpi_command        one command, over ssh
           slurm_script       for sbatch
           kubernetes_text    a Service and an indexed Job, for kubectl

They only write; `pyops.launch.starting` starts.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from pyops.launchers import LaunchError

__all__ = [
    "PORT",
    "Job",
    "kubernetes_text",
    "mpi_command",
    "slurm_script",
    "torchrun_command",
]

PORT = 29500  # where agents of torchrun meet, by its custom
TIMES = r"(\d+-)?\d+(:\d\d?){0,2}"  # of Slurm: minutes, hours:minutes:seconds, days-hours:...
LABEL = r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?"  # of Kubernetes, with room for "-123"


@dataclass(frozen=True)
class Job:
    """A run as its launcher sees it."""

    name: str
    """Of the run."""
    arguments: tuple[str, ...]
    """Of pyops: "train", the file and its overrides."""
    nodes: int = 1
    """How many hosts."""
    ranks_per_node: int = 1
    """Processes of each host."""
    gpus_per_node: int = 0
    """Devices to ask for; 0 asks for none."""
    cpus_per_rank: int = 1
    """Cores of each process."""
    time: str = ""
    """Slurm's time limit, "24:00:00" say; "" for that of the partition."""
    log: str = "slurm-%j.out"
    """Slurm's file of what the ranks print; %j is the job's number."""
    options: tuple[str, ...] = ()
    """More options of the launcher, "--partition=gpu" say."""
    host: str = ""
    """The first node, as the others reach it, with a port if it is not 29500."""
    hostfile: str = ""
    """mpirun's file of hosts."""
    image: str = ""
    """The container's, of Kubernetes."""
    config: str = ""
    """The text of the configuration, which Kubernetes carries to the containers."""
    claim: str = ""
    """The PersistentVolumeClaim that all containers have at /work, where the run's folder lies."""

    def __post_init__(self) -> None:
        for field in ("nodes", "ranks_per_node", "cpus_per_rank"):
            if (value := getattr(self, field)) < 1:
                raise LaunchError(f"{_option(field)} is {value}; give 1 or more")
        if self.gpus_per_node < 0:
            raise LaunchError(f"--gpus-per-node is {self.gpus_per_node}; give 0 or more")
        if 0 < self.gpus_per_node < self.ranks_per_node:
            raise LaunchError(
                f"--ranks-per-node is {self.ranks_per_node}, but --gpus-per-node is "
                f"{self.gpus_per_node}: each rank needs a device of its own; make them equal"
            )

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node


def torchrun_command(job: Job, *, python: str = "python") -> list[str]:
    """The words that start the ranks of one node; with several nodes, the same on each.

    Args:
        job: What is started.
        python: The interpreter.

    Raises:
        LaunchError: Several nodes without the first one's address.
    """
    words = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks_per_node)]
    if job.nodes == 1:
        words.append("--standalone")
    elif not job.host:
        raise LaunchError(
            f"--nodes is {job.nodes}, but the nodes need a place to meet: give each the same "
            "--host NAME[:PORT], that of the first"
        )
    else:
        host = job.host if ":" in job.host else f"{job.host}:{PORT}"
        words += ["--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", host]
        words += ["--rdzv-id", job.name, "--max-restarts", "3"]
    return [*words, *job.options, "-m", "pyops", *job.arguments]


def mpi_command(job: Job, *, flavor: str = "Open MPI", python: str = "python") -> list[str]:
    """The words that start all ranks by mpirun.

    Args:
        job: What is started.
        flavor: "Open MPI", or "Hydra" of MPICH and Intel MPI.
        python: The interpreter.
    """
    each, threads = str(job.ranks_per_node), str(job.cpus_per_rank)
    words = ["mpirun", "-n", str(job.ranks)]
    if flavor == "Hydra":
        words += ["-ppn", each, *(["-f", job.hostfile] if job.hostfile else [])]
        words += ["-genv", "OMP_NUM_THREADS", threads]
    else:
        words += ["--map-by", f"ppr:{each}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        words += ["--hostfile", job.hostfile] if job.hostfile else []
        words += ["-x", f"OMP_NUM_THREADS={threads}"]
    return [*words, *job.options, python, "-m", "pyops", *job.arguments]


def slurm_script(job: Job, *, python: str = "python") -> str:
    """The file for sbatch: a task of srun for each rank. Five minutes before the time limit the
    ranks get SIGUSR1, save, and have the job requeued.

    Args:
        job: What is started.
        python: The interpreter.

    Raises:
        LaunchError: A time limit that is none of Slurm's.
    """
    if job.time and not re.fullmatch(TIMES, job.time):
        raise LaunchError(
            f"--time is {job.time!r}; write it as Slurm does: 24:00:00, or 2-12:00:00 with days"
        )
    asked = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_rank,
        "time": job.time or None,
        "signal": "USR1@300",
        "output": job.log,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None]
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += [f"#SBATCH {option}" for option in job.options]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"export OMP_NUM_THREADS={job.cpus_per_rank}",
            "# srun takes the number of cores from here alone, since Slurm 22.05.",
            f"export SRUN_CPUS_PER_TASK={job.cpus_per_rank}",
            "srun --kill-on-bad-exit=1 " + shlex.join([python, "-m", "pyops", *job.arguments]),
            "",
        ]
    )


def kubernetes_text(job: Job) -> str:
    """The manifest for kubectl: the configuration, a Service that gives the pods names, and a Job
    of one pod for each node, in which torchrun starts the ranks.

    Args:
        job: What is started; its configuration is read at /config/config.toml.

    Raises:
        LaunchError: No image, or a name that Kubernetes does not take.
    """
    if not job.image:
        raise LaunchError("--kubernetes needs --image, a container that has pyops and torch")
    if not re.fullmatch(LABEL, job.name):
        raise LaunchError(
            f"the run's name {job.name!r} is none of Kubernetes, which takes small letters, digits "
            "and '-', at most 52: give it another by --set name=..."
        )
    torchrun = ["torchrun", "--nproc-per-node", str(job.ranks_per_node)]
    torchrun += ["--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--rdzv-id", job.name]
    torchrun += ["--rdzv-endpoint", f"{job.name}-0.{job.name}:{PORT}", "--max-restarts", "3"]
    limits = {"nvidia.com/gpu": job.gpus_per_node} if job.gpus_per_node else {}
    limits |= {"cpu": job.cpus_per_rank * job.ranks_per_node}
    mounts = [{"name": "config", "mountPath": "/config"}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, object]] = [
        {"name": "config", "configMap": {"name": job.name}},
        # A container has 64 MiB otherwise, too little for collectives over shared memory.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if job.claim:
        mounts.append({"name": "work", "mountPath": "/work"})
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": job.claim}})
    container = {
        "name": "ranks",
        "image": job.image,
        "workingDir": "/work",
        "command": [*torchrun, *job.options, "-m", "pyops", *job.arguments],
        "env": [{"name": "OMP_NUM_THREADS", "value": str(job.cpus_per_rank)}],
        "resources": {"limits": limits},
        "volumeMounts": mounts,
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": volumes,
    }
    labels = {"metadata": {"labels": {"app": job.name}}}
    documents = [
        _document("v1", "ConfigMap", job, {"data": {"config.toml": job.config}}),
        _document(
            "v1",
            "Service",
            job,
            # Pods find one another before they are ready: they are ready when they have.
            {
                "spec": {
                    "clusterIP": "None",
                    "publishNotReadyAddresses": True,
                    "selector": {"app": job.name},
                }
            },
        ),
        _document(
            "batch/v1",
            "Job",
            job,
            {
                "spec": {
                    "completionMode": "Indexed",
                    "completions": job.nodes,
                    "parallelism": job.nodes,
                    "backoffLimit": 3 * job.nodes,
                    "template": {**labels, "spec": pod},
                }
            },
        ),
    ]
    return "---\n".join(_yaml(each) for each in documents)


def _document(version: str, kind: str, job: Job, rest: dict[str, object]) -> dict[str, object]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, **rest}


def _yaml(value: object, indent: int = 0) -> str:
    """A value in YAML: lists of words in one line, texts as JSON writes them."""
    margin = " " * indent
    if isinstance(value, dict):
        lines = []
        for key, inner in value.items():
            nested = isinstance(inner, dict) or (
                isinstance(inner, list) and any(isinstance(each, dict) for each in inner)
            )
            name = key if re.fullmatch(r"[\w.-]+", key) else json.dumps(key)
            text = "\n" + _yaml(inner, indent + 2) if nested else f" {_scalar(inner)}\n"
            lines.append(f"{margin}{name}:{text}")
        return "".join(lines)
    assert isinstance(value, list)
    return "".join(f"{margin}- {_yaml(each, indent + 2).lstrip()}" for each in value)


def _scalar(value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./:@-]*", value)
    return str(value) if plain and value not in ("true", "false") else json.dumps(value)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
