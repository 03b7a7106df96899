"""Replicas that train on their own and meet every so many steps: what a slow link needs.

    outer = LocalSGD(model, optimizer, LocalSGDConfig(method="diloco", every=100, codec="int8"))
    for batch in my_part_of_the_batches:
        loss(model(batch)).backward()
        optimizer.step()             # of this replica alone
        outer.step()                 # every 100th time the replicas meet

| file | what it does |
|---|---|
| averaging.py | LocalSGD: what a user calls |
| config.py | its options: local SGD, post-local SGD, EASGD, DiLoCo; fragments, delay, codecs |
| checks.py | what is refused |
| fragments.py | which layers are exchanged together, and when: pure arithmetic |
| values.py | the tensors that a replica's optimizer steps, masters and parts of ZeRO among them |
| part.py, extras.py | the global vector and the outer step; buffers and states |
| exchange.py | how replicas reach one another |
| members.py | replicas that find one another in a store, come and go |
| virtual_time.py | replicas as threads over a clock that is computed |
| saving.py | states, for checkpoints and for replicas that join |
"""

from pyops.local_sgd.averaging import LocalSGD
from pyops.local_sgd.config import LocalSGDConfig
from pyops.local_sgd.exchange import Exchange
from pyops.local_sgd.members import Members

__all__ = ["Exchange", "LocalSGD", "LocalSGDConfig", "Members"]
