"""Everything that one process owns: its environment, its children, its run folder, its end."""
