"""Device memory: the plan at the start, the quotas that follow demand, and the monitor of the device."""
