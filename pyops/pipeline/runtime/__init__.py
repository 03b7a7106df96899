"""A pipeline's step: the actions of a schedule, executed.

| file | what it does |
|---|---|
| pipeline.py | Pipeline: what users call |
| setup_agreement.py, microbatch.py | what the ranks agree on; how a batch is cut |
| executor.py, stage.py | the actions of a rank, in order; forward and backward of a stage |
| tied.py, batch_norm.py, skips.py | tied weights, batch statistics, skip connections of stages |
| weight_versions.py | asynchronous schedules: the weights that a micro-batch meets |
| stage_optimizer.py, async_steps.py | their optimizer steps within the schedule |
"""
