"""From a configuration to running processes on this machine."""
