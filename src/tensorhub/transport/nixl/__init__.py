"""The nixl transport: weights by NIXL's one-sided reads over UCX."""
