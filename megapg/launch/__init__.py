"""Who started this process: its rank, how many there are, and where they meet."""

from megapg.launch.detect import detect
from megapg.launch.network import Network, choose_network
from megapg.launch.process import Launch

__all__ = ["Launch", "Network", "choose_network", "detect"]
