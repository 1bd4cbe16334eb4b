"""Pure functions (view, now) -> decision, shared by the gate, the engine and the simulator."""
