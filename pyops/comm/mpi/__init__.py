"""MPI in the place of Gloo, over mpi4py: for clusters whose fast network only the vendor's MPI
supports.

    mpirun -n 2 python script.py          pyops.launch.join(backend="mpi")

| file | what it does |
|---|---|
| transport.py | the small transport of pyops.comm.collectives, over a communicator of MPI |
| process_group.py | torch's process group over one: the backend "mpi4py" |
| reduction.py | operations and datatypes of torch in the terms of MPI |
"""

from pyops.comm.mpi.process_group import MPIProcessGroup, register
from pyops.comm.mpi.transport import MPITransport

__all__ = ["MPIProcessGroup", "MPITransport", "register"]
