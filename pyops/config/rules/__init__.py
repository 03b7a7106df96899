"""What the sections of a run may say beside one another."""
