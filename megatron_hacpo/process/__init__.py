"""Child processes that cannot outlive this one."""
