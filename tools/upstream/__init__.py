"""Run Megatron-core's unit tests on its globals and on a session of megapg."""

ON_A_SESSION = "MEGAPG_UPSTREAM_ON_A_SESSION"
"""The environment variable that has a rank open sessions."""
