"""The parts of Tandem's scheduler that run in EngineCore, and the server's connection to them."""
