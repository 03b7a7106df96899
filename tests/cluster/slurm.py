"""A Slurm of two nodes on this host: its daemons from unpacked packages, nothing installed, all its
files in one folder.

    munged   slurmctld -- slurmd n1
                      `-- slurmd n2
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.workers import ROOT

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libmunge2",
    "libhwloc15",
)
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CryptoType=crypto/munge
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def unpacked(cache: Path) -> Path:
    """The folder of the packages' files; skips the test where they can't be had."""
    root = cache / "root"
    if (root / "usr" / "bin" / "srun").exists():
        return root
    if shutil.which("apt-get") is None or os.getuid() != 0:
        pytest.skip("Slurm is unpacked from packages of apt, by root")
    cache.mkdir(parents=True, exist_ok=True)
    told = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=cache, capture_output=True, text=True
    )
    if told.returncode:
        pytest.skip(f"apt-get has no packages of Slurm here: {told.stderr.strip()[-200:]}")
    for package in cache.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def free_ports(count: int) -> list[int]:
    """Of this host."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            with closing(each):
                pass


class Slurm:
    """The commands of a running Slurm."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def __call__(self, *words: str, timeout: float = 60, check: bool = True) -> str:
        """What a command prints."""
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str) -> str:
        """The number of a new job."""
        return self("sbatch", "--parsable", *words).strip()

    def state(self, job: str) -> str:
        """The state of a job."""
        told = self("scontrol", "show", "job", job)
        return told.partition("JobState=")[2].split()[0]

    def wait(self, job: str, *states: str, timeout: float = 90) -> str:
        """Wait until the job is in one of these states."""
        until = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            assert time.monotonic() < until, f"job {job} is {state}\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"{file.name}:\n{file.read_text()[-1500:]}" for file in self.folder.glob("*.log")
        )


@contextmanager
def running(folder: Path, root: Path) -> Iterator[Slurm]:
    """A Slurm whose files are in `folder`."""
    library = root / "usr" / "lib" / "x86_64-linux-gnu"
    binaries = root / "usr"
    (folder / "state").mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    folder.chmod(0o755)
    text = CONFIG.format(
        host=socket.gethostname(),
        ports=free_ports(3),
        folder=folder,
        plugins=library / "slurm-wlm",
    )
    (folder / "slurm.conf").write_text(text)
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{library}:{library / 'slurm-wlm'}",
        "PATH": f"{binaries / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    munge = ["--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--{each}-file={folder}/munge.{each}" for each in ("key", "pid", "log", "seed")]
    step = str(binaries / "sbin" / "slurmstepd-wlm")
    commands = [
        [binaries / "sbin" / "munged", *munge],
        [binaries / "sbin" / "slurmctld-wlm", "-D"],
        *(
            [binaries / "sbin" / "slurmd-wlm", "-D", "-N", name, "-d", step]
            for name in ("n1", "n2")
        ),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    with open(folder / "daemons.log", "wb") as log:
        try:
            for command in commands:
                daemons.append(
                    subprocess.Popen(
                        [str(word) for word in command], env=environment, stdout=log, stderr=log
                    )
                )
                time.sleep(0.5)
            slurm = Slurm(folder, environment)
            until = time.monotonic() + 40
            while "2" not in slurm("sinfo", "-h", "-t", "idle", "-o", "%D", check=False):
                assert time.monotonic() < until, slurm.logs()
                time.sleep(0.3)
            yield slurm
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
