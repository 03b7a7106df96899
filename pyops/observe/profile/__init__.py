"""Where a step spends its time: by module and pass, operations by formula, memory, one trace of all
ranks."""
