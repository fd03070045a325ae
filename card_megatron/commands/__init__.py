"""One file for each command: its options, and the calls that do it."""
