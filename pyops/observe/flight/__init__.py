"""Flight records of collectives: read, explained, and watched while ranks run."""
