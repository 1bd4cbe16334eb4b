"""Pure policies `(view, now) -> decision`, shared by the gate, the engine plug-in and the simulator."""
