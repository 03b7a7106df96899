"""The outputs of frozen layers: computed, or kept in memory and on disk and read, whichever is
faster."""
