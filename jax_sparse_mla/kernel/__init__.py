"""The gfx950 kernel: its FlyDSL source, its compiler front end and its launch contract."""
