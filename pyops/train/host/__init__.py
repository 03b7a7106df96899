"""The processes and the machine: ranks and how they meet, signals, memory limits."""
