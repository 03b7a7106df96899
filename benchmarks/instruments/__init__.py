"""What measures: samples and rows, the machine, targets, tables, rivals, teams of processes."""
