"""Knowledge distillation: a smaller model, the student, learns what a larger one, the teacher, says
of each word or class (Hinton et al., 2015).

    student = student_from_layers(teacher, keep=[0, 2, 4, 7, 9, 11])    DistilBERT's choice of 12
    distillation = Distillation(DistillationConfig(temperature=2.0, soft=5.0, hard=2.0, hidden=1.0))
    found = distillation(student, freeze(teacher), {"input_ids": tokens}, targets)
    found.loss.backward()            found.soft, found.hard, found.hidden: each term, for the log

| file | what it does |
|---|---|
| student.py | a student of some of the teacher's layers |
| teacher.py | a teacher that stays as it is |
| head_input.py | what the last layer of a model is given, instead of logits |
| hidden_states.py | the hidden states of two models' layers, compared |
| distillation.py | the loss |
| taught_head.py | the same within the last layer of a student, for a trainer |
| attention_maps.py | where two models' attention looks, compared |
| student_words.py | batches that the student itself writes |
| class_teacher.py | a classifier's logits of numbered samples |
| stored_logits.py | a teacher's most probable words, on disk |
"""

from pyops.distill.attention_maps import (
    AttentionScores,
    HeadMap,
    attention_difference,
    recorded_attention,
)
from pyops.distill.class_teacher import ClassTeacher
from pyops.distill.distillation import Distillation, DistillationConfig, DistillationLoss
from pyops.distill.logits import logits_divergence
from pyops.distill.stored_logits import StoredLogits, read_logits, stored_divergence, write_logits
from pyops.distill.student import student_from_layers
from pyops.distill.student_words import OnPolicyBatch, on_policy
from pyops.distill.taught_head import TaughtHead
from pyops.distill.teacher import freeze
from pyops.tensor_parallel import DivergenceConfig, LinearLogits, linear_kl_divergence

__all__ = [
    "AttentionScores",
    "ClassTeacher",
    "Distillation",
    "DistillationConfig",
    "DistillationLoss",
    "DivergenceConfig",
    "HeadMap",
    "LinearLogits",
    "OnPolicyBatch",
    "StoredLogits",
    "TaughtHead",
    "attention_difference",
    "freeze",
    "linear_kl_divergence",
    "logits_divergence",
    "on_policy",
    "read_logits",
    "recorded_attention",
    "stored_divergence",
    "student_from_layers",
    "write_logits",
]
