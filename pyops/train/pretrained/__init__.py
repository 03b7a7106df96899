"""A Hugging Face folder that is trained, evaluated, or asked to continue a text, on any layout of
the ranks, by `pyops.parallel.parallelize`.

| file | what it does |
|---|---|
| folder_model.py | FolderModel: what the folder says of its model, and the trainer of it |
| folder_data.py | FolderData: the rows of a run, as the folder's tokenizer cuts them |
| folder_tokens.py | FolderTokens: rows of files of tokens, which the folder's tokenizer made |
| changed_models.py | the folder's model with adapters, or with some of its layers |
| folder_teacher.py | the teacher of a run with [distill] |
| folder_training.py | FolderTraining: what `pyops train` does with [model] folder |
| folder_use.py | what `pyops generate` and `pyops eval` do |
"""
