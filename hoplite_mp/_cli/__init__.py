"""The command line: `hoplite-mp`, its commands and their output."""
