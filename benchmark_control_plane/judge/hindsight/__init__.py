"""What a schedule that knows all arrivals and lengths could attain on the simulated device."""
