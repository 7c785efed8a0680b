"""The command line: `hoplite-mp`, its commands and what they print."""
