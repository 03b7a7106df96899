"""`pyops launch CONFIG.toml`: the run on several processes or hosts, by the launcher that is there;
`pyops doctor`: what differs between the ranks.

    pyops launch gpt.toml --ranks-per-node 2                              torchrun, this host
    pyops launch healing.toml --ranks-per-node 2           with [healing], ranks are replaced
    pyops launch gpt.toml --nodes 2 --host node1                          the same on each of two
    pyops launch gpt.toml --slurm --nodes 8 --gpus-per-node 8 --time 24:00:00
    pyops launch gpt.toml --mpi --nodes 2 --hostfile hosts
    pyops launch gpt.toml --kubernetes --nodes 2 --image pyops:1 --claim runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyops.cli.overrides import add_overrides

__all__ = ["add_doctor", "add_launch", "examined", "launch"]


def add_launch(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops launch`."""
    parser.add_argument("config", metavar="CONFIG.toml")
    add_overrides(parser)
    by = parser.add_mutually_exclusive_group()
    for name, meaning in (
        ("slurm", "submit a script by sbatch"),
        ("mpi", "start the ranks by mpirun"),
        ("kubernetes", "apply a Job by kubectl"),
    ):
        by.add_argument(
            f"--{name}", action="store_const", const=name, dest="launcher", help=meaning
        )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="hosts (1)")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="processes of each host (as many as --gpus-per-node, or 1)",
    )
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N")
    parser.add_argument("--cpus-per-rank", type=int, default=1, metavar="N")
    parser.add_argument("--time", default="", metavar="HH:MM:SS", help="Slurm's time limit")
    parser.add_argument(
        "--host", default="", metavar="NAME[:PORT]", help="the first of several nodes"
    )
    parser.add_argument("--hostfile", default="", metavar="FILE", help="mpirun's file of hosts")
    parser.add_argument("--image", default="", help="the container's, of Kubernetes")
    parser.add_argument(
        "--claim", default="", help="Kubernetes' volume claim that all containers have at /work"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        dest="options",
        metavar="=--OPTION",
        help="one more option of the launcher: --option=--partition=gpu",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of this run"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be started, and start nothing"
    )


def launch(given: argparse.Namespace) -> int:
    """Start the run, or print how.

    Args:
        given: The arguments.

    Returns:
        The exit code.

    Raises:
        ConfigError, LaunchError: For what the user can put right, before anything is started.
    """
    from pyops.config import load_config
    from pyops.launch.starting import shown, start, start_replaced
    from pyops.launch.texts import Job

    config = load_config(given.config, overrides=given.overrides)
    launcher = given.launcher or "torchrun"
    if config.healing.on:
        _check_healing(given, every=config.healing.copy_every)
        launcher = "supervisor"
    in_cluster = launcher == "kubernetes"
    path = "/config/config.toml" if in_cluster else given.config
    overrides = [word for each in given.overrides for word in ("--set", each)]
    job = Job(
        name=config.name,
        arguments=("train", path, *overrides, *(["--resume"] if given.resume else [])),
        nodes=given.nodes,
        ranks_per_node=given.ranks_per_node or given.gpus_per_node or 1,
        gpus_per_node=given.gpus_per_node,
        cpus_per_rank=given.cpus_per_rank,
        time=given.time,
        log=f"{config.folder}.slurm-%j.out",
        options=tuple(given.options),
        host=given.host,
        hostfile=given.hostfile,
        image=given.image,
        config=Path(given.config).read_text() if in_cluster else "",
        claim=given.claim,
    )
    if not config.parallel.adapt:
        config.check_ranks(job.ranks)
    if given.dry_run:
        print(shown(job, launcher), end="")
        return 0
    if launcher == "supervisor":
        return start_replaced(job, most_idle=config.observe.max_idle_restarts)
    script = config.folder.with_name(f"{config.folder.name}.slurm.sh")
    return start(job, launcher, script=script)


def _check_healing(given: argparse.Namespace, *, every: int) -> None:
    """ConfigError for a way to start ranks that replaces none."""
    from pyops.config import ConfigError

    way = f"--{given.launcher}" if given.launcher else f"--nodes {given.nodes}"
    if given.launcher or given.nodes != 1:
        raise ConfigError(
            f"healing.copy_every is {every}, which ranks take that this command starts and "
            f"replaces on its own host, but {way} was given; leave it out, or set "
            "healing.copy_every to 0"
        )


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops doctor`."""
    parser.add_argument(
        "--folder",
        default="runs",
        metavar="FOLDER",
        help="where runs lie; all ranks must see the same one (runs)",
    )


def examined(given: argparse.Namespace) -> int:
    """Print what differs between the ranks, and what is short on one.

    Args:
        given: The arguments.

    Returns:
        The exit code: 0 if nothing was found, else 2.
    """
    import torch.distributed as dist

    from pyops.cli.first_rank import is_first_rank
    from pyops.launch.doctor import examine

    report = examine(Path(given.folder))
    if dist.is_initialized():
        dist.destroy_process_group()
    if is_first_rank():
        print(report.text())
    return 2 if report.findings else 0
