"""What is measured in place of formulas: this machine, the blocks of a model, any layers."""
