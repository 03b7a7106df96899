"""Several processes as one run: started by torchrun, mpirun, srun or a cluster's manager, joined,
stopped in time, and looked over.

| file | what it does |
|---|---|
| joining.py | join: which rank this process is, and the process group |
| rendezvous.py | the ranks of one attempt meet in a store |
| interfaces.py | network interfaces that the environment names and the host lacks |
| requeue.py | Slurm starts a run again that its time limit or a preemption has ended |
| texts.py, starting.py | what `pyops launch` writes, and starts |
| supervisor.py | Supervisor: ranks of this host, and another process for each that dies |
| facts.py, doctor.py | what `pyops doctor` asks of every rank, and what it finds |
"""

from pyops.launch.joining import join
from pyops.launchers import Launch, LaunchError, recognized

__all__ = ["Launch", "LaunchError", "join", "recognized"]
