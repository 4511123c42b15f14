"""``python -m gfx950_sim.hip``: builds the library and prints its path."""

from gfx950_sim.hip import build

print(build())
