"""Step 4, the best compromise: throughput and memory of every way to use four devices, from one
profile.

    python examples/lab/search.py                   or: ... 6, for 6 MiB a device
    python examples/lab/search.py 6 search.svg      with a picture
"""

import sys

import torch
from tiny import make_batch, make_model

from pyops.mesh import ALONE
from pyops.pipeline import profile
from pyops.plan import Layout, ProfiledCosts

DEVICES, BATCH, MIB = 4, 32, 1 << 20
limit = float(sys.argv[1]) * MIB if len(sys.argv) > 1 else 6 * MIB
torch.set_num_threads(1)
found = []
for micro in (1, 2, 4, 8):
    layers = make_model().layers()
    measured = ProfiledCosts(profile(layers, make_batch(micro)[0], rounds=3, group=ALONE))
    for pp in (1, 2, 4):
        dp = DEVICES // pp
        number = BATCH // (dp * micro)
        layout = Layout(
            pp=pp,
            dp=dp,
            schedule="1f1b" if pp > 1 else "none",
            micro_batch=micro,
            num_microbatches=number,
        )
        seconds, memory = measured.step(layout)
        found.append((BATCH / seconds, memory, f"{layout}, {number} micro-batches of {micro}"))
fastest, largest = max(f[0] for f in found), max(f[1] for f in found)
print(f"{'layout':36} images a second        MiB a device")
for speed, memory, name in sorted(found, reverse=True):
    bars = (f"{'#' * round(20 * part):20}" for part in (speed / fastest, memory / largest))
    quick, full = bars
    note = "" if memory <= limit else "  does not fit"
    print(f"{name:36} {speed:5.0f} {quick} {memory / MIB:5.1f} {full}{note}".rstrip())
fitting = [f for f in found if f[1] <= limit]
best = max(fitting)[2] if fitting else "none"
print(f"best within {limit / MIB:g} MiB: {best}")

if len(sys.argv) > 2:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lab"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for pp in (1, 2, 4):
        points = [f for f in found if f[2].startswith(f"pp {pp}" if pp > 1 else "dp")]
        axes.plot([f[1] / MIB for f in points], [f[0] for f in points], "o-", label=f"pp {pp}")
        for speed, memory, name in points:
            axes.annotate(name.split()[-1], (memory / MIB, speed), fontsize=8)
    axes.axvline(limit / MIB, color="black", linestyle=":")
    axes.set_xlabel("MiB of the fullest device; dotted: the limit")
    axes.set_ylabel("images a second")
    axes.set_title("four devices; numbers: images of a micro-batch")
    axes.legend()
    figure.savefig(sys.argv[2], metadata={"Date": None})
