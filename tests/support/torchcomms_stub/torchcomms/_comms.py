from torchcomms import _BackendWrapper  # noqa: F401  (from where torch imports it)
