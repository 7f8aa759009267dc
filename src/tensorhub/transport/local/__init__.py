"""The local transport: weights between two workers of one host, copied once."""
