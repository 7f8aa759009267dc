"""The house rules as tests: what STYLE asks for and a machine can see. Each checker is tested on bad code itself."""
