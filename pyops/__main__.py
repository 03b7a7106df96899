"""`python -m pyops`, and so `torchrun -m pyops`: the same as the command `pyops`."""

import sys

from pyops.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
