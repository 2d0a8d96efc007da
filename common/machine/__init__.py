"""The machine on which a process runs: its memory, its folders, the path of its Python environment."""
