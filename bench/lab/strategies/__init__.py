"""How weights get from the trainer to the rollouts: one module for each way, all with the same two sides."""
