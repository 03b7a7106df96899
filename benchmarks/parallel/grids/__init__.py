"""Grids of ranks: what a layer costs on them, over a limited link and beside what was published."""
