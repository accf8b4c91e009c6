"""Who started this process: its rank, how many there are, and where they meet."""

from megapg.launch.launch import Launch
from megapg.launch.network import Network, choose_network
from megapg.launch.resolve import detect

__all__ = ["Launch", "Network", "choose_network", "detect"]
