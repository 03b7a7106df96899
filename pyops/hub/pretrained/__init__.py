"""Models of any class of transformers, made without memory and filled from a Hugging Face folder
part by part, and written back, where each rank has its own part only.

    model = empty_model(folder)                     parameters on the meta device, buffers real
    with PretrainedWeights(folder) as weights:
        weights.check(model)                        names and shapes, before anything is read
        parallelize(model, group=tp, check=False)   cut over tensor-parallel ranks, and stages
        optimizer = ZeroOptimizer(model, ..., ZeroConfig(initialize=weights.fill))
    save_pretrained(model, folder, mesh=mesh)       what from_pretrained of transformers reads

| file | what it does |
|---|---|
| models_without_memory.py | empty_model, empty_like_config |
| weights.py | PretrainedWeights: check, fill |
| sources.py | which tensors of the files a tensor of the model is made of, and back |
| layouts.py | a rank's part of a tensor, and the tensor as it is in the files |
| saving.py, save_plan.py | save_pretrained; who writes what into which file |
| adapters.py | the same of adapters of PEFT |
| torch_checkpoints.py | the same for torch.distributed.checkpoint, and back |
"""

from pyops.hub.pretrained.adapters import Adapters
from pyops.hub.pretrained.models_without_memory import empty_like_config, empty_model
from pyops.hub.pretrained.saving import save_pretrained
from pyops.hub.pretrained.weights import PretrainedWeights, WeightReport

__all__ = [
    "Adapters",
    "PretrainedWeights",
    "WeightReport",
    "empty_like_config",
    "empty_model",
    "save_pretrained",
]
