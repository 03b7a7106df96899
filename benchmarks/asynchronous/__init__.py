"""Training whose workers do not wait for each other at every step."""
