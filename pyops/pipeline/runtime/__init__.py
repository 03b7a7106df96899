"""A pipeline's step: the actions of a schedule, executed.

| file | what it does |
|---|---|
| pipeline.py | Pipeline: what users call |
| agreed.py, microbatch.py | what the ranks agree on; how a batch is cut |
| execute.py, stage.py | the actions of a rank, in order; forward and backward of a stage |
| tied.py, batch_norm.py, skips.py | tied weights, batch statistics, skip connections between stages
|
| versions.py, stepping.py, stream.py | asynchronous schedules: weight versions and optimizer steps
within the schedule |
"""
