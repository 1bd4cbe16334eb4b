"""The round model of the MC-SF paper: simulator, policies, hindsight optimum and reproductions."""
